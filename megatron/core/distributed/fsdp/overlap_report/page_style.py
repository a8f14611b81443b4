"""The style of the report's page."""

STYLE = """
:root { color-scheme: light; --ink: #1d2733; --soft: #5b6773; --line: #dfe4ea; --panel: #ffffff; --ground: #f5f7f9; --exposed: #d1495b; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 21px; line-height: 1.35; margin: 2px 0 6px; font-weight: 600; text-wrap: pretty; }
h2 { font-size: 16px; margin: 0 0 4px; }
p { margin: 0 0 8px; }
.soft { color: var(--soft); font-size: 13.5px; }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px 16px; margin-top: 16px; }
.bar { display: flex; height: 26px; border-radius: 4px; overflow: hidden; margin: 12px 0 6px; background: var(--line); }
.bar div { height: 100%; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13.5px; }
.key { display: inline-flex; align-items: center; gap: 6px; white-space: nowrap; }
.key i { width: 12px; height: 12px; border-radius: 3px; display: inline-block; }
.tools { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 8px 0; }
button, input { font: inherit; font-size: 14px; color: var(--ink); border: 1px solid #c4ccd4; border-radius: 6px; background: #fff; padding: 4px 11px; min-height: 34px; }
input { min-width: 0; width: 210px; }
button:hover { background: #eef2f5; }
canvas { display: block; width: 100%; touch-action: pan-y; cursor: grab; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 9px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; background: var(--panel); }
th.sorts { cursor: pointer; }
th small { display: block; font-weight: 400; color: var(--soft); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--panel); }
td.zero { color: #a7b0b9; }
td.high { color: #a3172c; font-weight: 600; }
td.worse { color: #a3172c; } td.better { color: #1d7a53; }
#tip { position: fixed; z-index: 9; pointer-events: none; background: #1d2733; color: #fff; font-size: 13px; line-height: 1.4; padding: 6px 9px; border-radius: 5px; max-width: 300px; display: none; white-space: pre-line; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 14px; margin: 8px 0 0; font-size: 13.5px; }
dt { font-weight: 600; } dd { margin: 0; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft); }
svg { display: block; width: 100%; height: auto; }
@media (max-width: 640px) { main { padding: 12px 8px 32px; } section { padding: 12px 10px; } h1 { font-size: 18px; } dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; } th, td { padding: 4px 6px; } }
"""
