"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (tag, text, parent, className) => {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  if (parent) parent.append(element);
  return element;
};
const ms = value => value === 0 ? "0" : value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value >= 1 ? value.toFixed(2) : value.toFixed(3);
const bytes = value => value >= 2 ** 30 ? (value / 2 ** 30).toFixed(2) + " GiB" : value >= 2 ** 20 ? (value / 2 ** 20).toFixed(1) + " MiB" : (value / 1024).toFixed(1) + " KiB";
const nameOf = row => row.name;
const tip = $("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  const right = event.clientX + 14 + tip.offsetWidth > innerWidth;
  tip.style.left = Math.max(4, right ? event.clientX - tip.offsetWidth - 10 : event.clientX + 14) + "px";
  tip.style.top = Math.min(innerHeight - tip.offsetHeight - 6, event.clientY + 14) + "px";
}
function keys(parent, entries) {
  for (const [color, text] of entries) {
    const key = make("span", null, parent, "key");
    make("i", null, key).style.background = color;
    make("span", text, key);
  }
}

// ---- a table that sorts ---------------------------------------------------------------------------------------------
// column: {name, sub, key, text(value, row), className(value, row)}
function table(parent, columns, rows, {sortBy, few = 24, filter = null}) {
  let by = columns[sortBy], ascending = false, all = rows.length <= few, words = "";
  const scroll = make("div", null, parent, "scroll");
  const element = make("table", null, scroll);
  const more = make("button", null, parent);
  more.style.marginTop = "8px";
  more.onclick = () => { all = !all; draw(); };
  function draw() {
    element.replaceChildren();
    const head = make("tr", null, make("thead", null, element));
    for (const column of columns) {
      const cell = make("th", column.name + (column === by ? (ascending ? " ▲" : " ▼") : ""), head, "sorts");
      if (column.sub) make("small", column.sub, cell);
      cell.title = column.title || "";
      cell.onclick = () => { ascending = column === by ? !ascending : !!column.isText; by = column; draw(); };
    }
    const body = make("tbody", null, element);
    let shown = rows.filter(row => !words || nameOf(row).toLowerCase().includes(words));
    const value = row => { const found = by.value(row); return found === null || found === undefined ? -Infinity : found; };
    shown.sort((a, b) => {
      const x = value(a), y = value(b);
      const order = typeof x === "string" ? String(x).localeCompare(String(y), undefined, {numeric: true}) : x - y;
      return ascending ? order : -order;
    });
    const total = shown.length;
    if (!all && !words) shown = shown.slice(0, few);
    for (const row of shown) {
      const line = make("tr", null, body);
      for (const column of columns) {
        const value = column.value(row);
        const isZero = value === null || value === undefined || value === 0;
        const text = column.text ? column.text(value, row) : isZero ? "–" : ms(value);
        make("td", text, line, (column.className && column.className(value, row)) || (isZero ? "zero" : ""));
      }
    }
    more.style.display = rows.length > few && !words ? "" : "none";
    more.textContent = all ? "show fewer" : "show all " + total;
  }
  if (filter) filter.oninput = () => { words = filter.value.toLowerCase(); draw(); };
  draw();
}

// ---- the whole step -------------------------------------------------------------------------------------------------
function wholeStep() {
  const parts = [["compute", "compute"], ["exposed", "exposed communication"], ["host", "waiting for the host"], ["latency", "between kernels"]];
  const bar = $("bar");
  for (const [name] of parts) {
    const part = make("div", null, bar);
    part.style.width = 100 * data.totals[name] / data.step_ms + "%";
    part.style.background = data.colors[name];
    part.title = name + " " + ms(data.totals[name]) + " ms";
  }
  keys($("barkeys"), parts.map(([name, text]) => [data.colors[name], `${text} ${ms(data.totals[name])} ms (${(100 * data.totals[name] / data.step_ms).toFixed(1)} %)`]));
}

// ---- the time line --------------------------------------------------------------------------------------------------
function timeLine() {
  const canvas = $("line"), context = canvas.getContext("2d");
  const lanes = [["compute", "compute"], ["gather", "all-gather"], ["reduce", "reduce"], ["other", "other comm."]]
    .filter(([lane]) => data.blocks[lane].length)
    .map(([lane, text]) => ({text, blocks: data.blocks[lane].map(([begin, end, row]) => ({begin, end, row, color: data.colors[lane], what: text}))}));
  const words = {exposed: "exposed communication", host: "waiting for the host", latency: "between kernels"};
  lanes.push({text: "no compute", blocks: data.idle.map(([begin, end, kind, row]) => ({begin, end, row, color: data.colors[kind], what: words[kind] + ", before"}))});
  if (data.calls.length) lanes.push({text: "host launches", blocks: data.calls.map(([begin, end]) => ({begin, end, row: -1, color: data.colors.calls, what: "the host launches work"}))});
  const margin = 92, top = 24, high = 30, gap = 8, foot = 24;
  canvas.style.height = top + lanes.length * (high + gap) + foot + "px";
  const turns = directions();
  let from = 0, to = data.step_ms, width = 0;
  const x = time => margin + (time - from) / (to - from) * (width - margin - 4);
  const timeAt = at => from + (at - margin) / (width - margin - 4) * (to - from);
  function draw() {
    const scale = devicePixelRatio || 1, height = canvas.clientHeight;
    width = canvas.clientWidth;
    canvas.width = width * scale; canvas.height = height * scale;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif"; context.textBaseline = "middle";
    const bottom = top + lanes.length * (high + gap);
    const step = niceStep((to - from) / Math.max(2, (width - margin) / 90));
    context.strokeStyle = "#e6eaee"; context.fillStyle = "#5b6773"; context.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      context.beginPath(); context.moveTo(x(at), 0); context.lineTo(x(at), bottom); context.stroke();
      const text = parseFloat(at.toFixed(6)) + " ms";
      if (x(at) + context.measureText(text).width / 2 < width && x(at) - context.measureText(text).width / 2 > margin - 8) context.fillText(text, x(at), bottom + 11);
    }
    context.textAlign = "left";
    turns.forEach(([begin, direction], at) => {
      const end = at + 1 < turns.length ? turns[at + 1][0] : data.step_ms, left = Math.max(x(begin), margin);
      if (end < from || begin > to) return;
      context.strokeStyle = "#8a949e"; context.setLineDash([3, 3]);
      if (x(begin) >= margin) { context.beginPath(); context.moveTo(x(begin), 2); context.lineTo(x(begin), bottom); context.stroke(); }
      context.setLineDash([]);
      if (x(end) - left > context.measureText(direction).width + 8) { context.fillStyle = "#5b6773"; context.fillText(direction, left + 4, 11); }
    });
    lanes.forEach((lane, at) => {
      const y = top + at * (high + gap);
      context.fillStyle = "#1d2733"; context.textAlign = "right";
      context.fillText(lane.text, margin - 8, y + high / 2);
      context.fillStyle = "#f1f4f6"; context.fillRect(margin, y, width - margin - 4, high);
      context.save(); context.beginPath(); context.rect(margin, y, width - margin - 4, high); context.clip(); context.textAlign = "left";
      for (const block of lane.blocks) {
        if (block.end < from || block.begin > to) continue;
        const left = x(block.begin), wide = Math.max(0.7, x(block.end) - left);
        context.globalAlpha = block.row >= 0 && block.row % 2 ? 0.72 : 1;
        context.fillStyle = block.color; context.fillRect(left, y, wide, high);
        context.globalAlpha = 1;
        if (block.row < 0 || wide < 34) continue;
        const row = data.rows[block.row], text = row.unit.length * 6.6 < wide - 8 ? row.unit : (row.unit.match(/\d+/) || [""])[0];
        if (text && context.measureText(text).width < wide - 6) {
          context.fillStyle = "#fff"; context.fillText(text, Math.max(left, margin) + 4, y + high / 2);
        }
      }
      context.restore();
    });
  }
  function zoom(factor, around) {
    const middle = around === undefined ? (from + to) / 2 : around;
    const wide = Math.min(data.step_ms, Math.max(data.step_ms / 5000, (to - from) * factor));
    from = Math.max(0, Math.min(data.step_ms - wide, middle - (middle - from) * wide / (to - from)));
    to = from + wide;
    draw();
  }
  function move(by) { const wide = to - from; from = Math.max(0, Math.min(data.step_ms - wide, from + by)); to = from + wide; draw(); }
  $("in").onclick = () => zoom(0.5); $("out").onclick = () => zoom(2);
  $("left").onclick = () => move(-(to - from) / 3); $("right").onclick = () => move((to - from) / 3);
  $("all").onclick = () => { from = 0; to = data.step_ms; draw(); };
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.shiftKey) return;  // else the page scrolls
    event.preventDefault();
    zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, timeAt(event.offsetX));
  }, {passive: false});
  let held = null;
  canvas.onpointerdown = event => { held = event.clientX; canvas.setPointerCapture(event.pointerId); };
  canvas.onpointerup = canvas.onpointercancel = () => { held = null; };
  canvas.onpointerleave = event => showTip(event, "");
  canvas.ondblclick = event => zoom(0.4, timeAt(event.offsetX));
  canvas.onpointermove = event => {
    if (held !== null) { move((held - event.clientX) / (width - margin) * (to - from)); held = event.clientX; return; }
    const lane = lanes[Math.floor((event.offsetY - top) / (high + gap))], time = timeAt(event.offsetX);
    const slack = (to - from) / (width - margin);
    const block = lane && event.offsetX >= margin && lane.blocks.find(each => each.begin - slack <= time && time <= each.end + slack);
    showTip(event, block ? `${block.what}${block.row >= 0 ? " " + nameOf(data.rows[block.row]) : ""}\n${ms(block.end - block.begin)} ms, from ${ms(block.begin)} ms` : "");
  };
  keys($("linekeys"), [...lanes.slice(0, -1).filter(lane => lane.blocks.length && lane.text !== "no compute").map(lane => [lane.blocks[0].color, lane.text]),
    [data.colors.exposed, "exposed communication"], [data.colors.host, "waiting for the host"]]);
  addEventListener("resize", draw);
  draw();
}
// where compute turns from one direction to another; short ones, and updates beside a forward, are left out
function directions() {
  const turns = [];
  for (const [begin, end, row] of data.blocks.compute) {
    const direction = data.rows[row].direction, last = turns[turns.length - 1];
    if (last && last[1] === direction) { last[2] = Math.max(last[2], end); continue; }
    turns.push([begin, direction, end]);
  }
  return turns.filter(([begin, , end]) => end - begin > data.step_ms / 100)
    .filter(([, direction], at, list) => !at || list[at - 1][1] !== direction);
}
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(each => each * power).find(each => each >= least);
}

// ---- memory ---------------------------------------------------------------------------------------------------------
function memoryStack() {
  const memory = data.memory, times = memory.times, end = times[times.length - 1] || 1;
  const kinds = Object.keys(memory.series).filter(kind => Math.max(...memory.series[kind]) > 0);
  const totals = times.map((_, at) => kinds.reduce((sum, kind) => sum + memory.series[kind][at], 0));
  const peak = Math.max(...totals, 1);
  const wide = Math.max(300, $("memory").clientWidth), tall = 300, left = 66, right = 8, top = 22, foot = 26;
  const x = time => left + time / end * (wide - left - right), y = value => tall - foot - value / peak * (tall - top - foot);
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${wide} ${tall}`);
  svg.setAttribute("role", "img"); svg.setAttribute("aria-label", "memory by kind over the step");
  const put = (tag, attributes, text) => {
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text) element.textContent = text;
    svg.append(element);
    return element;
  };
  const spans = memory.phases.map(([begin, direction], at) => [Math.max(0, begin), at + 1 < memory.phases.length ? memory.phases[at + 1][0] : end, direction]);
  for (const [begin, until, direction] of spans) {
    put("line", {x1: x(begin), x2: x(begin), y1: 4, y2: tall - foot, stroke: "#c4ccd4", "stroke-dasharray": "3 3"});
    if (x(until) - x(begin) > 60) put("text", {x: x(begin) + 5, y: 14}, direction);
  }
  let below = times.map(() => 0);
  for (const kind of kinds) {
    const above = below.map((value, at) => value + memory.series[kind][at]);
    const line = values => times.map((time, at) => [x(time), y(values[at])]);
    const steps = points => points.map(([px, py], at) => at ? `H${px.toFixed(1)}V${py.toFixed(1)}` : `${px.toFixed(1)},${py.toFixed(1)}`).join("");
    const down = line(below).reverse().map(([px, py], at, list) => at ? `V${py.toFixed(1)}H${px.toFixed(1)}` : `L${px.toFixed(1)},${py.toFixed(1)}`).join("");
    put("path", {d: "M" + steps(line(above)) + down + "Z", fill: data.memory_colors[kind]});
    below = above;
  }
  for (let at = 0; at <= 4; at++) {
    put("text", {x: left - 6, y: y(peak * at / 4) + 4, "text-anchor": "end"}, bytes(peak * at / 4));
    put("line", {x1: left, x2: wide - right, y1: y(peak * at / 4), y2: y(peak * at / 4), stroke: "#1d2733", "stroke-opacity": 0.12});
  }
  const step = niceStep(end / (wide / 110));
  for (let at = 0; at <= end; at += step) put("text", {x: Math.min(x(at), wide - 24), y: tall - 8, "text-anchor": "middle"}, parseFloat(at.toFixed(6)) + " ms");
  const cursor = put("line", {x1: 0, x2: 0, y1: top, y2: tall - foot, stroke: "#1d2733", "stroke-opacity": 0});
  svg.onpointermove = event => {
    const box = svg.getBoundingClientRect(), time = ((event.clientX - box.left) / box.width * wide - left) / (wide - left - right) * end;
    if (time < 0 || time > end) return;
    let at = times.findIndex(each => each > time) - 1;
    if (at < 0) at = times.length - 1;
    cursor.setAttribute("x1", x(time)); cursor.setAttribute("x2", x(time)); cursor.setAttribute("stroke-opacity", 0.6);
    showTip(event, `${ms(time)} ms: ${bytes(totals[at])}\n` + [...kinds].reverse().map(kind => `${kind} ${bytes(memory.series[kind][at])}`).join("\n"));
  };
  svg.onpointerleave = event => { cursor.setAttribute("stroke-opacity", 0); showTip(event, ""); };
  $("memory").append(svg);
  keys($("memorykeys"), [...kinds].reverse().map(kind => [data.memory_colors[kind], `${kind} ${bytes(memory.peak[kind])}`]));
}

// ---- what the page holds --------------------------------------------------------------------------------------------
const unitColumn = {name: "unit", value: nameOf, isText: true, text: value => value};
if (data.kind === "report") {
  wholeStep();
  timeLine();
  const most = Math.max(...data.rows.map(row => row.exposed));
  const rate = {text: value => value ? value < 0.095 ? value.toPrecision(1) : value.toFixed(value < 10 ? 1 : 0) : "–"};
  const size = {text: value => value ? bytes(value) : "–"};
  table($("units"), [
    unitColumn,
    {name: "exposed", sub: "ms", value: row => row.exposed, className: value => value > 0 && value >= most / 2 ? "high" : ""},
    {name: "compute", sub: "ms", value: row => row.compute},
    {name: "gather", sub: "ms", value: row => row.gather},
    {name: "reduce", sub: "ms", value: row => row.reduce},
    {name: "wait", sub: "ms", value: row => row.wait},
    {name: "host", sub: "ms", value: row => row.host},
    {name: "between", sub: "ms", value: row => row.latency},
    {name: "gathered", sub: "received", value: row => row.gather_nbytes, ...size},
    {name: "", sub: "GB/s", value: row => row.gather_gbps, ...rate},
    {name: "reduced", sub: "received", value: row => row.reduce_nbytes, ...size},
    {name: "", sub: "GB/s", value: row => row.reduce_gbps, ...rate},
  ], data.rows, {sortBy: 1, filter: $("filter")});
  if (data.memory.times) memoryStack(); else $("memory").textContent = "No memory was recorded.";
  const ranks = data.ranks.map((rank, at) => ({...rank, name: "rank " + at}));
  table($("ranks"), [
    {name: "rank", value: nameOf, isText: true, text: value => value},
    {name: "step", sub: "ms", value: row => row.step_ms},
    ...["compute", "exposed", "host", "latency", "wait"].map(name => ({name: name === "latency" ? "between" : name, sub: "ms", value: row => row[name]})),
  ], ranks, {sortBy: 2, few: 8});
} else {
  const change = (key, worse) => ({name: key === "latency" ? "between" : key, sub: "ms, B − A", value: row => row[key + "_change"],
    text: value => Math.abs(value) < 0.0005 ? "–" : (value > 0 ? "+" : "−") + ms(Math.abs(value)),
    className: value => Math.abs(value) < worse ? "zero" : value > 0 ? "worse" : "better"});
  const least = data.step_ms / 2000;
  table($("units"), [
    unitColumn,
    {name: "exposed", sub: "ms in A", value: row => row.exposed_a}, {name: "exposed", sub: "ms in B", value: row => row.exposed_b},
    ...["exposed", "compute", "gather", "reduce", "host", "latency", "wait"].map(key => change(key, least)),
    {name: "largest", sub: "ms, change", value: row => row.largest},
  ], data.rows, {sortBy: 10, filter: $("filter")});
}
