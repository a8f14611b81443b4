"""The table of the matrix: which ways to train are compared with one process, and with which command lines."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

MICRO_BATCH = 2
LOSS_SCALE = 4096
"""Of cells whose loss is per token."""
STEPS = 3
STRATEGIES: dict[str, tuple[str, str | None]] = {
    "no_shard": ("no_shard", None),
    "optim": ("optim", None),
    "optim_grads": ("optim_grads", None),
    "optim_grads_params": ("optim_grads_params", None),
    "hsdp": ("optim_grads_params", "no_shard"),
    "hfsdp": ("optim_grads_params", "optim"),
}
"""Name: (strategy, that of the outer axis where there are two instances)."""

_COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --make-vocab-size-divisible-by 8 "
    f"--train-iters {STEPS} --micro-batch-size {MICRO_BATCH} --lr 1e-2 --lr-warmup-iters 2 --min-lr 1e-3 "
    "--lr-decay-style cosine --weight-decay 0.1 --clip-grad 0.5 --adam-eps 1e-3 --eod-mask-loss --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 62 --num-workers 0 --eval-iters 0 --log-interval 1 "
    "--distributed-backend gloo --distributed-timeout-minutes 5 --use-megatron-fsdp"
)
_LLAMA = (
    "--untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --group-query-attention --num-query-groups 2"
)
# In fp32, since bf16 would make large differences of small ones.
_MUON = "--optimizer muon --muon-momentum 0.9 --muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high"
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --swiglu"
_LATENT = "--multi-latent-attention --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 8 --v-head-dim 5 --rotary-base 100"
_MTP = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
MODELS = {
    "gpt": f"{_COMMON} --group-query-attention --num-query-groups 2",  # tied, learned positions, LayerNorm, biases
    "llama": f"{_COMMON} {_LLAMA}",
    "moe": f"{_COMMON} {_EXPERTS} --disable-bias-linear --normalization RMSNorm --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01 "
    "--moe-shared-expert-intermediate-size 16",
    "moe_biased": f"{_COMMON} {_EXPERTS} --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--moe-layer-freq 2 --moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-router-topk-scaling-factor 1.5 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05",
    # biases of linear layers and of routers; balanced by a bias, without an auxiliary loss; groups of experts; and every other layer
    # dense
    "windows": f"{_COMMON} {_LLAMA} --window-size 3,0 --window-attn-skip-freq 2 --softmax-type learnable --no-rope-freq 2 "
    "--qk-l2-norm --attention-output-gate",  # the second layer sees all, and does not rotate
    "gemma": f"{_COMMON} --normalization RMSNorm --apply-layernorm-1p --sandwich-layernorm --geglu --disable-bias-linear "
    "--qk-layernorm --position-embedding-type rope --rotary-base 1000 --window-rotary-base 100 --window-size 3,0 "
    "--window-attn-skip-freq 2 --embedding-scale 5.6 --embedding-init-method-std 0.2 --softmax-scale 0.3 "
    "--group-query-attention --num-query-groups 2",
    "documents": f"{_COMMON} --group-query-attention --num-query-groups 2 --reset-position-ids --reset-attention-mask",
    "gpt_oss": f"{_COMMON} --enable-gpt-oss --window-size 3,0 --window-attn-skip-freq 2 --softmax-type learnable "
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --expert-tensor-parallel-size 1 --quick-geglu "
    "--glu-linear-offset 1 --activation-func-clamp-value 0.5 --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2",  # biases everywhere
    "latent": f"{_COMMON} {_LATENT} --q-lora-rank 12 --qk-layernorm --untie-embeddings-and-output-weights "
    "--normalization RMSNorm --swiglu --disable-bias-linear --rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 1.3 "
    "--original-max-position-embeddings 32 --beta-fast 8 "
    "--recompute-granularity selective --recompute-modules mla_up_proj core_attn",
    # tied, learned positions too, LayerNorm, biases; queries straight from the hidden states; nothing fused
    "latent_plain": f"{_COMMON} {_LATENT} --rope-type rope --no-rope-fusion",
    "muon": f"{_COMMON} {_MUON} --muon-nesterov --muon-tp-mode duplicated --group-query-attention --num-query-groups 2",
    "muon_llama": f"{_COMMON} {_LLAMA} {_MUON} --muon-tp-mode distributed --muon-scale-mode unit_rms_norm",
    "muon_moe": f"{_COMMON} {_EXPERTS} --disable-bias-linear {_MUON} --untie-embeddings-and-output-weights --position-embedding-type rope",
}
MODELS |= {
    "deepseek": f"{MODELS['latent']} --num-experts 8 --moe-layer-freq [0,1] --moe-ffn-hidden-size 16 --moe-router-topk 4 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.05 --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 16 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.05 --moe-router-dtype fp32 --mtp-num-layers 1",
    "mtp": f"{MODELS['gpt']} {_MTP}",
    "mtp_repeated": f"{MODELS['llama']} {_MTP} --mtp-use-repeated-layer --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
}
_DELTA = (
    "--experimental-attention-variant gdn --linear-key-head-dim 6 --linear-value-head-dim 5 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-conv-kernel-dim 3 --swiglu"
)
MODELS |= {
    # As Qwen3-Next, without its experts; what is between the projections is computed again in backward.
    "delta": f"{_COMMON} {_LLAMA} {_DELTA} --linear-attention-freq 2 --attention-output-gate --qk-layernorm --rotary-percent 0.5 "
    "--apply-layernorm-1p --recompute-granularity selective --recompute-modules core_attn",
    # tied, learned positions, LayerNorm, biases elsewhere
    "delta_tied": f"{_COMMON} {_DELTA} --linear-attention-freq [0,1]",
}
_MAMBA = (
    "--mamba-state-dim 6 --mamba-head-dim 4 --mamba-num-groups 2 --mamba-num-heads 6 --position-embedding-type none"
)
MODELS |= {
    # As Nemotron-H; pipeline stages end where the pattern says.
    "mamba": f"{_COMMON} {_MAMBA} --hybrid-layer-pattern M-|*M --normalization RMSNorm --disable-bias-linear --squared-relu "
    "--untie-embeddings-and-output-weights --recompute-granularity selective --recompute-modules core_attn",
    # tied, LayerNorm, biases elsewhere; and experts
    "mamba_moe": f"{_COMMON} {_MAMBA} --hybrid-layer-pattern M*ME {_EXPERTS} --moe-aux-loss-coeff 0.05",
}
FAMILIES = {
    "gpt": ("gpt", "llama"),
    "moe": ("moe", "moe_biased"),
    "attention": ("windows", "gemma"),
    "gpt_oss": ("gpt_oss",),
    "documents": ("documents",),
    "latent": ("latent", "latent_plain"),
    "deepseek": ("deepseek",),
    "delta": ("delta", "delta_tied"),
    "mamba": ("mamba", "mamba_moe"),
    "muon": ("muon", "muon_llama"),
    "muon_moe": ("muon_moe",),
    "mtp": ("mtp", "mtp_repeated"),
}
_HALVED = ("attention", "latent", "deepseek", "delta", "mamba", "gpt_oss", "documents", "muon", "muon_moe", "mtp")
"""Families whose loss is per token with four microbatches and per microbatch with one."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Between how many ranks the model is split."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    sp: bool = False
    layers: int = 2
    """Of the model: some stages need more than two."""
    stages: str = ""
    """Flags that say how pipeline ranks divide the layers."""

    @property
    def takes_turns(self) -> bool:
        """Whether ranks have several stages, which need as many microbatches as there are pipeline ranks."""
        return bool(self.stages) and "first" not in self.stages

    @property
    def model_ranks(self) -> int:
        """Ranks that compute one microbatch together; experts are divided over data-parallel ones."""
        return self.tp * self.cp * self.pp

    @property
    def flags(self) -> str:
        """The layout on the command line."""
        degrees = {
            "tensor-model": self.tp,
            "context": self.cp,
            "expert-model": self.ep,
            "pipeline-model": self.pp,
        }
        flags = [f"--{name}-parallel-size {degree}" for name, degree in degrees.items() if degree > 1]
        return " ".join([*flags, *["--sequence-parallel"] * self.sp, *[self.stages] * bool(self.stages)])


GPT_LAYOUTS = {
    "none": Layout(),
    "tp2": Layout(tp=2),
    "tp2+sp": Layout(tp=2, sp=True),
    "cp2": Layout(cp=2),
    "pp2": Layout(pp=2),
    "tp2+pp2": Layout(tp=2, pp=2),
    "cp2+pp2": Layout(cp=2, pp=2),
}
MOE_LAYOUTS = {
    "none": Layout(),
    "tp2+sp": Layout(tp=2, sp=True),  # with experts, tensor parallelism needs sequence parallelism
    "cp2": Layout(cp=2),
    "ep2": Layout(ep=2),
    "pp2": Layout(pp=2),
    "tp2+sp+pp2": Layout(tp=2, sp=True, pp=2),
    "ep2+tp2+sp": Layout(ep=2, tp=2, sp=True),
    "cp2+pp2": Layout(cp=2, pp=2),
}
_ACCOUNTED = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
STAGES_OF_GPT = {
    "pp2+vp2": Layout(pp=2, layers=4, stages="--num-layers-per-virtual-pipeline-stage 1"),
    "pp2+uneven": Layout(pp=2, layers=4, stages="--decoder-first-pipeline-num-layers 1"),
    "tp2+pp2+layout": Layout(tp=2, pp=2, stages="--pipeline-model-parallel-layout Et||t|L"),  # a stage without layers
}
STAGES_OF_MOE = {
    "pp2+vp2": Layout(pp=2, layers=4, stages="--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication"),
    "cp2+pp2+vp2": Layout(cp=2, pp=2, stages=f"--num-virtual-stages-per-pipeline-rank 2 {_ACCOUNTED}"),
}
STAGES_OF_MTP = {
    "pp2+vp2": Layout(pp=2, stages=f"--num-virtual-stages-per-pipeline-rank 2 {_ACCOUNTED}"),
}
"""Pipelines whose ranks have several stages, or uneven ones."""
_MAX_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A run in one process."""

    model: str
    microbatches: int
    per_token: bool
    layers: int = 2

    @property
    def argv(self) -> list[str]:
        """The command line, on one rank."""
        return _argv(self, f"--num-layers {self.layers}", self.microbatches)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run on several ranks."""

    family: str
    layout_name: str
    strategy: str
    microbatches: int
    """Of each data-parallel rank."""
    per_token: bool

    @property
    def name(self) -> str:
        """What the cell is called in reports."""
        loss = "token" if self.per_token else "mean"
        return f"{self.family}-{self.layout_name}-{self.strategy}-m{self.microbatches}-{loss}"

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.family][self.layout_name]

    @property
    def model(self) -> str:
        """One of the family's models, in turn: where it has two, each layout and each strategy meets both."""
        counts = self.per_token and self.family not in _HALVED
        turn = list(STRATEGIES).index(self.strategy) + counts + (self.microbatches > 1)
        models = FAMILIES[self.family]
        return models[turn % len(models)]

    @property
    def is_hybrid(self) -> bool:
        return STRATEGIES[self.strategy][1] is not None

    @property
    def data_parallel_size(self) -> int:
        """Two of each axis over which dense and expert weights are sharded, as far as eight ranks go."""
        layout = self.layout
        wanted = 2 * layout.ep if not self.is_hybrid else max(4 // layout.cp, 4 * (layout.ep > 1) * layout.ep)
        return min(wanted, _MAX_RANKS // layout.model_ranks)

    @property
    def ranks(self) -> int:
        return self.layout.model_ranks * self.data_parallel_size

    @property
    def reference(self) -> Reference:
        """One process whose microbatches are those of all data-parallel ranks: [Note: auxiliary losses] in README.md."""
        microbatches = self.microbatches * self.data_parallel_size
        return Reference(
            model=self.model, microbatches=microbatches, per_token=self.per_token, layers=self.layout.layers
        )

    @property
    def flags(self) -> str:
        """The layout and the strategy on the command line."""
        inner, outer = STRATEGIES[self.strategy]
        flags = f"--num-layers {self.layout.layers} {self.layout.flags} --data-parallel-sharding-strategy {inner}"
        if outer is not None:
            flags += f" --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy {outer}"
        if self.microbatches > 1:
            flags += " --overlap-grad-reduce --overlap-param-gather"
        # A power of two rounds nothing, so numbers are those of the one process, which scales no loss.
        return f"{flags} --loss-scale {LOSS_SCALE}" if self.per_token else flags

    @property
    def argv(self) -> list[str]:
        """The command line, on ``ranks`` ranks."""
        return _argv(self, self.flags, self.reference.microbatches)


def _argv(run: Reference | Cell, flags: str, microbatches: int) -> list[str]:
    per_token = "--calculate-per-token-loss" if run.per_token else ""
    return f"{MODELS[run.model]} --global-batch-size {microbatches * MICRO_BATCH} {flags} {per_token}".split()


LAYOUTS = {
    "gpt": {**GPT_LAYOUTS, **STAGES_OF_GPT},
    "moe": {**MOE_LAYOUTS, **STAGES_OF_MOE},
    "attention": GPT_LAYOUTS,
    "latent": GPT_LAYOUTS,
    "deepseek": {name: MOE_LAYOUTS[name] for name in ("ep2", "tp2+sp", "cp2", "pp2", "ep2+tp2+sp")},
    "gpt_oss": MOE_LAYOUTS,
    "documents": {name: GPT_LAYOUTS[name] for name in ("tp2+sp", "pp2")},
    "delta": {name: GPT_LAYOUTS[name] for name in ("none", "tp2", "tp2+sp", "pp2", "tp2+pp2")},
    "mamba": {
        "none": Layout(layers=4),
        "tp2+sp": Layout(tp=2, sp=True, layers=4),
        "pp2": Layout(pp=2, layers=4),
        "tp2+sp+pp2": Layout(tp=2, sp=True, pp=2, layers=4),
    },
    "muon": {name: GPT_LAYOUTS[name] for name in ("none", "tp2", "tp2+sp", "pp2")},
    "muon_moe": {name: MOE_LAYOUTS[name] for name in ("ep2", "ep2+tp2+sp")},
    "mtp": {**GPT_LAYOUTS, **STAGES_OF_MTP},
}

CELLS = {
    cell.name: cell
    for family, layouts in LAYOUTS.items()
    for layout, strategy, microbatches, per_token in product(layouts, STRATEGIES, (1, 4), (False, True))
    if family not in _HALVED or per_token == (microbatches == 4)
    if microbatches > 1 or not layouts[layout].takes_turns
    for cell in [
        Cell(family=family, layout_name=layout, strategy=strategy, microbatches=microbatches, per_token=per_token)
    ]
}

IN_CI = (
    "gpt-none-optim-m1-mean",
    "gpt-none-hfsdp-m4-token",
    "gpt-tp2-optim_grads_params-m4-token",
    "gpt-tp2+sp-optim_grads-m4-mean",
    "gpt-cp2-hsdp-m4-token",
    "gpt-pp2-optim-m1-token",
    "gpt-pp2-optim_grads_params-m4-mean",
    "gpt-tp2+pp2-hsdp-m4-token",
    "gpt-cp2+pp2-optim_grads_params-m1-mean",
    "gpt-pp2+vp2-optim_grads_params-m4-token",
    "gpt-pp2+uneven-optim-m1-mean",
    "mtp-cp2-optim_grads_params-m4-token",
    "mtp-pp2-optim-m1-mean",
    "moe-none-no_shard-m1-token",
    "moe-none-hsdp-m4-mean",
    "moe-tp2+sp-optim_grads_params-m4-mean",
    "moe-cp2-hfsdp-m1-token",
    "moe-ep2-optim-m1-mean",
    "moe-ep2-optim_grads_params-m4-token",
    "moe-pp2-optim_grads-m4-token",
    "moe-tp2+sp+pp2-optim_grads_params-m1-token",
    "moe-ep2+tp2+sp-hsdp-m1-token",
    "attention-tp2+sp-optim_grads_params-m4-token",
    "attention-cp2-optim_grads-m1-mean",
    "attention-pp2-optim-m1-mean",
    "gpt_oss-tp2+sp-optim_grads_params-m4-token",
    "documents-pp2-optim_grads_params-m4-token",
    "latent-tp2-optim_grads-m1-mean",
    "latent-tp2+sp-optim_grads_params-m4-token",
    "latent-cp2-optim_grads-m1-mean",
    "latent-pp2-optim-m1-mean",
    "deepseek-ep2-optim_grads_params-m4-token",
    "delta-tp2-optim-m1-mean",
    "delta-tp2+sp-optim_grads_params-m4-token",
    "mamba-tp2+sp-optim-m1-mean",
    "mamba-pp2-optim_grads_params-m4-token",
    "muon-none-hsdp-m1-mean",
    "muon-tp2+sp-optim_grads-m4-token",
    "muon_moe-ep2-optim-m1-mean",
)
"""The cells that every run of the tests computes: each layout, each strategy, each setting of the others."""
