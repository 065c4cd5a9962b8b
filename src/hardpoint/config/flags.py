"""The table of `serve` flags: one row per flag, with vLLM's names, types and defaults.

A row whose `why` is not empty is refused by name with that reason unless its value is the default or
one of `only`; nothing is accepted and ignored. `field` is the place in `VllmConfig` the value goes to;
rows of the front end have none and stay in the parsed arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hardpoint.config.sections import CompilationConfig, LoggingConfig, PoolerConfig
from hardpoint.config.sections.base import literal_values
from hardpoint.config.sections.cache import PrefixCachingHashAlgo
from hardpoint.config.sections.model import DEFAULT_MODEL, LogprobsMode
from hardpoint.config.sections.scheduler import SchedulerPolicy

# What a flag's text means. A tuple of strings is a choice, a section class is JSON with its fields,
# a Whole a bounded number; the bounds of other numbers are those of their section's fields.
STR, INT, SIZE, FLOAT, BOOL = "text", "integer", "size", "number", "switch"
JSON, WORDS, CSV, EACH, JSONLIST = "json object", "words", "comma list", "repeatable", "json list"
INTS = "integers"


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number within bounds; `most` None = no upper bound."""

    least: int
    most: int | None = None


# Why not.
LATER = "not supported yet"
NO_MEDIA = "this way to handle media is not supported yet"
NO_SHARDED_LORA = "each rank keeps the halves of adapters that it computes with; sharding both is not supported"
NO_MEDIA_LORA = "adapters of media towers are not supported"
NO_EXPERT_LORA = "adapters of experts are not supported"
NO_SPEC = "speculative decoding is not supported yet"
NO_BUDGET = "a budget for reasoning is not supported yet"
NO_RANKS = "this way to use several ranks is not supported yet"
ONE_FRONT = "the replicas of a model are all this server's own"
ONE_NODE = "the mp executor runs on one machine; use --distributed-executor-backend ray for several"
NO_MAMBA = "state-space models are not supported yet"
NO_MOE = "each rank holds a part of every expert, and there is one way to compute them"
NO_EXPERT_IDS = "which experts computed a token is not told"
NO_OFFLOAD = "offloading weights is not supported yet"
NO_TRANSFER = "moving the KV cache between engines is not supported yet"
NO_GRAPHS = "steps with an adapter are not replayed from device graphs"
NO_LEVELS = "there are no further levels"
NEVER = "does not apply to this engine: "


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    names    `--name`, then aliases
    kind     one of the kinds above, a tuple of choices, or a section class
    default  None also where the value is found later
    field    path in VllmConfig, or empty
    help     in a line
    why      reason of refusal, empty where the flag works
    only     values besides the default that are not refused
    """

    names: tuple[str, ...]
    kind: Any
    default: Any
    field: str
    help: str
    why: str = ""
    only: tuple[Any, ...] = ()

    @property
    def dest(self) -> str:
        """The name in EngineArgs and in the parsed arguments."""
        return self.names[0].lstrip("-").replace("-", "_")

    def allows(self, value: Any) -> bool:
        """Whether a value is accepted."""
        return not self.why or any(type(value) is type(ok) and value == ok for ok in (self.default, *self.only))


def reason(flag: Flag) -> str:
    """Why the flag is refused, with what is accepted."""
    if not flag.only:
        return flag.why
    return f"{flag.why}; accepted: {', '.join(str(value) for value in (flag.default, *flag.only) if value is not None)}"


def F(names: str, kind: Any, default: Any, field: str, help: str, why: str = "", only: tuple[Any, ...] = ()) -> Flag:
    """Make a row of the table."""
    return Flag(tuple(names.split()), kind, default, field, help, why, only)


# fmt: off
# ruff: noqa: E501
GROUPS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        F("--runner",                     ("auto", "generate", "pooling", "draft"), "auto", "model_config.runner", "what the model is run for; auto: what its files say", NO_SPEC, ("generate", "pooling")),
        F("--convert",                    ("auto", "none", "embed", "classify"), "auto", "model_config.convert", "adapter that makes a generating model pool; auto: what its files say"),
        F("--tokenizer",                  STR,   None,   "model_config.tokenizer", "tokenizer, if not the model's own: a path, repository or catalogue name"),
        F("--tokenizer-mode",             STR,   "auto", "model_config.tokenizer_mode", "auto or hf", "other tokenizer kinds are not supported yet", ("hf",)),
        F("--trust-remote-code",          BOOL,  False,  "model_config.trust_remote_code", "accepted, and changes nothing: code from a model's repository is never run. A model or tokenizer that has nothing else is refused; one that has is served by our own class"),
        F("--dtype",                      STR,   "auto", "model_config.dtype", "number format: auto, half, float16, bfloat16, float or float32. auto on a CPU computes in float32, also for bfloat16 checkpoints, because half formats are slow there; float32 asks for exact float32 arithmetic also on quantised weights"),
        F("--seed",                       INT,   0,      "model_config.seed", "seed of the random draws of requests that bring none"),
        F("--hf-config-path",             STR,   None,   "model_config.hf_config_path", "other place of the config", LATER),
        F("--revision",                   STR,   None,   "model_config.revision", "branch, tag or commit of the model's repository"),
        F("--code-revision",              STR,   None,   "model_config.code_revision", "revision of repository code", "code from repositories is not run yet"),
        F("--tokenizer-revision",         STR,   None,   "model_config.tokenizer_revision", "branch, tag or commit of the tokenizer's repository"),
        F("--max-model-len",              SIZE,  None,   "model_config.max_model_len", "tokens of context, prompt and output together (8k, 1M); auto or -1 takes what fits into memory; default: what the model was made for"),
        F("--quantization -q",            STR,   None,   "model_config.quantization", "quantisation method; default: what the files say"),
        F("--quantization-config",        JSON,  None,   "model_config.quantization_config", "quantise while loading", LATER),
        F("--allow-deprecated-quantization", BOOL, False, "model_config.allow_deprecated_quantization", "allow deprecated methods", "no deprecated method exists here"),
        F("--enforce-eager",              BOOL,  False,  "model_config.enforce_eager", "compile nothing, whatever --compilation-config says"),
        F("--enable-return-routed-experts", BOOL, False, "", "expert ids in outputs", NO_EXPERT_IDS),
        F("--return-sampling-mask",       BOOL,  False,  "model_config.return_sampling_mask", "kept token support in outputs", LATER),
        F("--max-logprobs",               INT,   20,     "model_config.max_logprobs", "most log-probabilities a request may ask for; -1 = the vocabulary"),
        F("--logprobs-mode",              literal_values(LogprobsMode), "raw_logprobs", "model_config.logprobs_mode", "what is returned as log-probability"),
        F("--use-fp64-gumbel",            BOOL,  False,  "model_config.use_fp64_gumbel", "double-precision noise", LATER),
        F("--enable-trace-replay",        BOOL,  False,  "model_config.enable_trace_replay", "allow forced output ids", LATER),
        F("--disable-sliding-window",     BOOL,  False,  "model_config.disable_sliding_window", "end the context at the attention window"),
        F("--skip-tokenizer-init",        BOOL,  False,  "model_config.skip_tokenizer_init", "token ids in, token ids out"),
        F("--enable-prompt-embeds",       BOOL,  False,  "model_config.enable_prompt_embeds", "embeddings as prompts", LATER),
        F("--served-model-name",          WORDS, None,   "model_config.served_model_name", "name or names in the API; the first one labels metrics"),
        F("--config-format",              STR,   "auto", "model_config.config_format", "auto or hf", "other formats are not supported yet", ("hf",)),
        F("--hf-token",                   STR,   None,   "model_config.hf_token", "Hugging Face token; without a value, the stored one"),
        F("--hf-overrides",               JSON,  {},     "model_config.hf_overrides", "JSON merged over the model's config"),
        F("--model-class-overrides",      JSON,  {},     "model_config.model_class_overrides", "JSON: model class name to module:Class, for development"),
        F("--pooler-config",              PoolerConfig, None,   "model_config.pooler_config", "JSON: how a pooling model pools (pooling_type, use_activation, ...); default: what its files say"),
        F("--generation-config",          STR,   "auto", "model_config.generation_config", "sampling defaults: auto = the model's generation_config.json, vllm = none, or a folder"),
        F("--override-generation-config", JSON,  {},     "model_config.override_generation_config", "JSON over the sampling defaults"),
        F("--enable-sleep-mode",          BOOL,  False,  "model_config.enable_sleep_mode", "sleep and wake", LATER),
        F("--model-impl",                 ("auto", "vllm", "transformers", "terratorch"), "auto", "model_config.model_impl", "which implementation of models", "there are no models of Terratorch", ("vllm", "transformers")),
        F("--logits-processors",          WORDS, None,   "model_config.logits_processors", "module:Class of further logits processors"),
        F("--io-processor-plugin",        STR,   None,   "model_config.io_processor_plugin", "IO processor plugin for /pooling with data; default: what the model's config names"),
        F("--renderer-num-workers",       INT,   1,      "model_config.renderer_num_workers", "renderer threads", LATER),
        F("--allowed-local-media-path",   STR,   "",     "model_config.allowed_local_media_path", "root of file:// media"),
        F("--allowed-media-domains",      WORDS, None,   "model_config.allowed_media_domains", "hosts that media may come from"),
        F("--disable-cascade-attn",       BOOL,  None,   "", "", NEVER + "deprecated, and there is no cascade attention"),
        F("--sleep-mode-offload-cudagraph", BOOL, False, "", "", NEVER + "there are no CUDA graphs in sleep mode"),
        F("--sleep-preserve-parameter-names", WORDS, [], "", "", NEVER + "it belongs to level-2 sleep"),
        F("--enable-cumem-allocator",     BOOL,  False,  "", "", NEVER + "it belongs to vLLM's CUDA allocator"),
        F("--enable-nccl-comm-suspend",   BOOL,  False,  "", "", NEVER + "it belongs to NCCL memory in sleep mode"),
    ),
    "Load and weight offload": (
        F("--load-format",                STR,   "auto", "load_config.load_format", "auto, hf, safetensors, gguf, dummy, or one that a plugin registered"),
        F("--download-dir",               STR,   None,   "load_config.download_dir", "folder for downloads; default: Hugging Face's cache"),
        F("--safetensors-load-strategy",  STR,   None,   "load_config.safetensors_load_strategy", "how files are read", LATER),
        F("--safetensors-prefetch-num-threads", INT, 8,  "load_config.safetensors_prefetch_num_threads", "prefetch threads", LATER),
        F("--safetensors-prefetch-block-size", SIZE, 16 * 1024 * 1024, "load_config.safetensors_prefetch_block_size", "bytes per read", LATER),
        F("--model-loader-extra-config",  JSON,  {},     "load_config.model_loader_extra_config", "JSON for the loader"),
        F("--ignore-patterns",            WORDS, ["original/**/*"], "load_config.ignore_patterns", "files of a repository that are not downloaded"),
        F("--use-tqdm-on-load",           BOOL,  True,   "load_config.use_tqdm_on_load", "progress bar while loading"),
        F("--pt-load-map-location",       STR,   "cpu",  "load_config.pt_load_map_location", "device map of .pt files", ".pt files are not read: they are pickles"),
        F("--offload-backend",            ("auto", "uva", "prefetch"), "auto", "offload_config.offload_backend", "how weights are offloaded", NO_OFFLOAD),
        F("--cpu-offload-gb",             FLOAT, 0,      "offload_config.uva.cpu_offload_gb", "host space for weights", NO_OFFLOAD, (0.0,)),
        F("--cpu-offload-params",         WORDS, None,   "", "parameter names", NO_OFFLOAD),
        F("--offload-group-size",         INT,   0,      "offload_config.prefetch.offload_group_size", "every N layers", NO_OFFLOAD),
        F("--offload-num-in-group",       INT,   1,      "offload_config.prefetch.offload_num_in_group", "layers per group", NO_OFFLOAD),
        F("--offload-prefetch-step",      INT,   1,      "offload_config.prefetch.offload_prefetch_step", "layers ahead", NO_OFFLOAD),
        F("--offload-params",             WORDS, None,   "", "parameter names", NO_OFFLOAD),
    ),
    "Attention and kernels": (
        F("--attention-backend",          STR,   None,   "attention_config.backend", "attention backend, or CUSTOM; default: the platform's"),
        F("--attention-config -ac",       JSON,  None,   "attention_config", "attention settings", LATER),
        F("--mamba-backend",              STR,   "triton", "mamba_config.backend", "state-space kernels", NO_MAMBA),
        F("--kernel-config",              JSON,  None,   "kernel_config", "kernel settings", LATER),
        F("--ir-op-priority",             JSON,  {},     "kernel_config.ir_op_priority", "op to implementations", LATER),
        F("--moe-backend",                STR,   "auto", "kernel_config.moe_backend", "expert kernels", NO_MOE),
        F("--linear-backend",             STR,   "auto", "kernel_config.linear_backend", "matrix kernels", LATER),
        F("--mamba-ssu-algorithm",        STR,   None,   "", "", NEVER + "it is a flashinfer option"),
        F("--enable-mamba-cache-stochastic-rounding", BOOL, False, "", "", NEVER + "state is never rounded at random"),
        F("--mamba-cache-philox-rounds",  INT,   0,      "", "", NEVER + "state is never rounded at random"),
        F("--enable-flashinfer-autotune", BOOL,  None,   "", "", NEVER + "it tunes GPU kernels"),
        F("--sparse-indexer-topk-backend", STR,  "auto", "", "", NEVER + "it chooses a GPU kernel"),
        F("--gdn-prefill-backend",        STR,   None,   "", "", NEVER + "it chooses a GPU kernel"),
        F("--kda-prefill-backend",        STR,   None,   "", "", NEVER + "it chooses a GPU kernel"),
        F("--kda-decode-backend",         STR,   None,   "", "", NEVER + "it chooses a GPU kernel"),
    ),
    "Parallel": (
        F("--distributed-executor-backend", STR, None,   "parallel_config.distributed_executor_backend", "uni = the worker inside the engine core, mp = a process per worker, ray = an actor per worker on a running Ray cluster, external_launcher = a process per rank started by torchrun (scripts only), or the dotted path of an Executor class; default: uni for one rank, else mp"),
        F("--tensor-parallel-size -tp",   INT,   1,      "parallel_config.tensor_parallel_size", "ranks that share each layer; it must divide the model's heads and MLP channels"),
        F("--pipeline-parallel-size -pp", INT,   1,      "parallel_config.pipeline_parallel_size", "stages that share out the layers (VLLM_PP_LAYER_PARTITION says how)"),
        F("--data-parallel-size -dp",     INT,   1,      "parallel_config.data_parallel_size", "replicas of the model, an engine core each; requests go to the least busy one, or to the one that their header X-data-parallel-rank names"),
        F("--data-parallel-rank -dpn",    INT,   None,   "", "rank of this replica", ONE_FRONT),
        F("--data-parallel-start-rank -dpr", INT, None,  "", "first rank of this node", ONE_FRONT),
        F("--data-parallel-size-local -dpl", INT, None,  "parallel_config.data_parallel_size_local", "engines of this server's own: all of --data-parallel-size, or 0 for a server that uses one engine started with --headless"),
        F("--data-parallel-address -dpa", STR,   None,   "parallel_config.data_parallel_master_ip", "address of an engine started with --headless, for it and for its server; one that other machines can reach needs HARDPOINT_LINK_KEY; default: 127.0.0.1"),
        F("--data-parallel-rpc-port -dpp", Whole(1, 65535), None, "parallel_config.data_parallel_rpc_port", "port of an engine started with --headless; default: 29550"),
        F("--data-parallel-backend -dpb", ("mp", "ray"), "mp", "parallel_config.data_parallel_backend", "who runs the replicas", ONE_FRONT),
        F("--data-parallel-hybrid-lb -dph", BOOL, False, "parallel_config.data_parallel_hybrid_lb", "balance inside the node", ONE_FRONT),
        F("--data-parallel-external-lb -dpe", BOOL, False, "parallel_config.data_parallel_external_lb", "balance outside", ONE_FRONT),
        F("--master-addr",                STR,   "127.0.0.1", "parallel_config.master_addr", "address of the head node", ONE_NODE),
        F("--master-port",                INT,   29501,  "parallel_config.master_port", "port of the head node", ONE_NODE),
        F("--nnodes -n",                  INT,   1,      "parallel_config.nnodes", "nodes", ONE_NODE),
        F("--node-rank -r",               INT,   0,      "parallel_config.node_rank", "index of this node", ONE_NODE),
        F("--distributed-timeout-seconds", INT,  None,   "parallel_config.distributed_timeout_seconds", "how long ranks wait for each other; default: 1800 (on CUDA devices 600)"),
        F("--cpu-distributed-timeout-seconds", INT, None, "parallel_config.cpu_distributed_timeout_seconds", "the same for what they exchange in main memory; default: --distributed-timeout-seconds"),
        F("--numa-bind",                  BOOL,  False,  "parallel_config.numa_bind", "pin workers to memory nodes", NO_RANKS),
        F("--numa-bind-nodes",            WORDS, None,   "parallel_config.numa_bind_nodes", "the nodes", NO_RANKS),
        F("--numa-bind-cpus",             WORDS, None,   "parallel_config.numa_bind_cpus", "the processors", NO_RANKS),
        F("--device-ids",                 CSV,   None,   "parallel_config.assigned_physical_gpu_ids", "physical devices", NO_RANKS),
        F("--worker-cls",                 STR,   "auto", "parallel_config.worker_cls", "dotted path of the worker class; auto = the platform's"),
        F("--worker-extension-cls",       STR,   "",     "parallel_config.worker_extension_cls", "dotted path of a class whose methods are added to the worker"),
        F("--max-parallel-loading-workers", INT, None,   "parallel_config.max_parallel_loading_workers", "workers that load at once", NO_RANKS),
        F("--disable-custom-all-reduce",  BOOL,  False,  "parallel_config.disable_custom_all_reduce", "use the plain collective (there is no other)"),
        F("--enable-shm-tensor-arena",    BOOL,  False,  "parallel_config.enable_shm_tensor_arena", "shared-memory tensors", NO_RANKS),
        F("--enable-expert-parallel -ep", BOOL,  False,  "parallel_config.enable_expert_parallel", "share out experts", NO_MOE),
        F("--enable-ep-weight-filter",    BOOL,  False,  "parallel_config.enable_ep_weight_filter", "read local experts only", NO_MOE),
        F("--expert-placement-strategy",  ("linear", "round_robin"), "linear", "parallel_config.expert_placement_strategy", "where experts go", NO_MOE),
        F("--enable-eplb",                BOOL,  False,  "parallel_config.enable_eplb", "balance experts", NO_MOE),
        F("--eplb-config",                JSON,  None,   "parallel_config.eplb_config", "expert balancing settings", NO_MOE),
        F("--all2all-backend",            STR,   "allgather_reducescatter", "parallel_config.all2all_backend", "expert exchange", NO_MOE),
        F("--enable-batch-sharded-sampling", BOOL, None, "", "split sampling over ranks", NO_RANKS),
        F("--decode-context-parallel-size -dcp", INT, 1, "parallel_config.decode_context_parallel_size", "ranks that share the cache", NO_RANKS),
        F("--prefill-context-parallel-size -pcp", INT, 1, "parallel_config.prefill_context_parallel_size", "ranks that share a prompt", NO_RANKS),
        F("--dcp-comm-backend",           STR,   None,   "", "exchange of cache shares", NO_RANKS),
        F("--cp-kv-cache-interleave-size", INT,  None,   "", "tokens per turn", NO_RANKS),
        F("--dp-sync-interval",           INT,   16,     "parallel_config.dp_sync_interval", "steps between syncs", NO_RANKS),
        F("--enable-fault-tolerance",     BOOL,  False,  "parallel_config.enable_fault_tolerance", "recover lost engines", NO_RANKS),
        F("--fault-tolerance-config",     JSON,  None,   "parallel_config.fault_tolerance_config", "recovery settings", NO_RANKS),
        F("--data-parallel-multi-port-external-lb", BOOL, False, "", "", NEVER + "there is no supervisor with a port per rank"),
        F("--dcp-q-replicate",            BOOL,  None,   "", "", NEVER + "it belongs to latent attention on GPUs"),
        F("--dcp-kv-cache-interleave-size", INT, 1,      "", "", NEVER + "it is an old name of --cp-kv-cache-interleave-size"),
        F("--enable-dbo",                 BOOL,  False,  "parallel_config.enable_dbo", "", NEVER + "there is no dual batch overlap"),
        F("--ubatch-size",                INT,   0,      "parallel_config.ubatch_size", "", NEVER + "there are no micro-batches"),
        F("--dbo-decode-token-threshold", INT,   32,     "", "", NEVER + "there is no dual batch overlap"),
        F("--dbo-prefill-token-threshold", INT,  512,    "", "", NEVER + "there is no dual batch overlap"),
        F("--disable-nccl-for-dp-synchronization", BOOL, None, "", "", NEVER + "replicas do not synchronise over NCCL"),
        F("--enable-elastic-ep",          BOOL,  False,  "parallel_config.enable_elastic_ep", "", NEVER + "the number of ranks is fixed"),
        F("--elastic-ep-max-dp-size",     INT,   None,   "", "", NEVER + "the number of ranks is fixed"),
        F("--enable-hc-sp",               BOOL,  False,  "", "", NEVER + "it belongs to one model that is not here"),
        F("--ray-workers-use-nsight",     BOOL,  False,  "parallel_config.ray_workers_use_nsight", "", NEVER + "it profiles workers on Ray"),
    ),
    "Cache": (
        F("--block-size",                 INT,   None,   "cache_config.block_size", "tokens in a block of the KV cache; default 16"),
        F("--gpu-memory-utilization --device-memory-utilization", FLOAT, 0.92, "cache_config.gpu_memory_utilization", "share of memory for this server. On a CPU: of the memory that is free at the start; while it is left at its default the KV cache takes at most 4 GiB, or what one request of full length needs"),
        F("--kv-cache-memory-bytes",      SIZE,  None,   "cache_config.kv_cache_memory_bytes", "exact size of the KV cache (20G); wins over the share. VLLM_CPU_KVCACHE_SPACE says the same in GiB"),
        F("--kv-cache-dtype",             STR,   "auto", "cache_config.cache_dtype", "number format of the KV cache: auto, float32, float16, bfloat16 or int8_per_token_head (short: int8). auto is the model's own, and float16 where weights stay quantised on a CPU"),
        F("--num-gpu-blocks-override",    INT,   None,   "cache_config.num_gpu_blocks_override", "exact number of blocks, for tests"),
        F("--enable-prefix-caching",      BOOL,  None,   "cache_config.enable_prefix_caching", "reuse the cache of equal prompt beginnings (default on)"),
        F("--prefix-caching-hash-algo",   literal_values(PrefixCachingHashAlgo), "sha256", "cache_config.prefix_caching_hash_algo", "hash of cached blocks"),
        F("--prefix-cache-retention-interval", INT, 0,   "cache_config.prefix_cache_retention_interval", "kept checkpoints", LATER),
        F("--prefix-match-unit",          INT,   None,   "cache_config.prefix_match_unit", "finest hit boundary", LATER),
        F("--kv-cache-dtype-skip-layers", WORDS, [],     "cache_config.kv_cache_dtype_skip_layers", "layers left unquantised", LATER),
        F("--kv-sharing-fast-prefill",    BOOL,  False,  "cache_config.kv_sharing_fast_prefill", "experimental", LATER),
        F("--swa-bounded-replay",         BOOL,  True,   "cache_config.swa_bounded_replay", "rebuild window KV", LATER),
        F("--mamba-cache-dtype",          STR,   "auto", "cache_config.mamba_cache_dtype", "state format", NO_MAMBA),
        F("--mamba-ssm-cache-dtype",      STR,   "auto", "cache_config.mamba_ssm_cache_dtype", "state format", NO_MAMBA),
        F("--mamba-block-size",           INT,   None,   "cache_config.mamba_block_size", "state block", NO_MAMBA),
        F("--mamba-cache-mode",           STR,   "none", "cache_config.mamba_cache_mode", "state caching", NO_MAMBA),
        F("--enable-mamba-shared-prefix-checkpoint", BOOL, False, "", "state checkpoint", NO_MAMBA),
        F("--kv-offloading-size",         FLOAT, None,   "cache_config.kv_offloading_size", "host buffer, GiB", NO_TRANSFER),
        F("--kv-offloading-backend",      ("native", "lmcache"), "native", "cache_config.kv_offloading_backend", "who offloads", NO_TRANSFER),
        F("--use-replayssm",              BOOL,  False,  "", "", NEVER + "it is a GPU state-space kernel"),
        F("--replayssm-buffer-len",       INT,   16,     "", "", NEVER + "it is a GPU state-space kernel"),
    ),
    "Scheduler": (
        F("--max-num-batched-tokens",     SIZE,  None,   "scheduler_config.max_num_batched_tokens", "tokens computed in a step, which is as long as a stream may wait for the prompts of others; default 256 in a server and 2048 in a script on a CPU, 2048 and 8192 elsewhere"),
        F("--max-num-scheduled-tokens",   SIZE,  None,   "scheduler_config.max_num_scheduled_tokens", "what the scheduler uses of it; default: all"),
        F("--max-num-seqs",               INT,   None,   "scheduler_config.max_num_seqs", "requests computed at once; default 128 in a server, 256 in a script"),
        F("--max-num-active-seqs",        INT,   None,   "scheduler_config.max_num_active_seqs", "requests admitted at once, if fewer than --max-num-seqs"),
        F("--max-num-queued-reqs",        INT,   None,   "scheduler_config.max_num_queued_reqs", "requests accepted at once; more get 503"),
        F("--max-num-queued-tokens",      SIZE,  None,   "scheduler_config.max_num_queued_tokens", "prompt tokens waiting at once; more get 503"),
        F("--long-prefill-token-threshold", INT, 0,      "scheduler_config.long_prefill_token_threshold", "most tokens of one prompt in a step, so that shorter ones are admitted beside it; 0 = no limit"),
        F("--long-prefill-token-threshold-adaptive", BOOL, False, "scheduler_config.long_prefill_token_threshold_adaptive", "let a prompt have more than the threshold where an even share of the step is more"),
        F("--scheduling-policy",          literal_values(SchedulerPolicy), "fcfs", "scheduler_config.policy", "who goes first"),
        F("--enable-chunked-prefill",     BOOL,  None,   "scheduler_config.enable_chunked_prefill", "split long prompts over steps (default on)"),
        F("--disable-chunked-mm-input",   BOOL,  False,  "scheduler_config.disable_chunked_mm_input", "keep media whole"),
        F("--scheduler-cls",              STR,   None,   "scheduler_config.scheduler_cls", "dotted path of a scheduler class"),
        F("--scheduler-reserve-full-isl", BOOL,  True,   "scheduler_config.scheduler_reserve_full_isl", "admit a request only if its whole prompt fits the cache"),
        F("--watermark",                  FLOAT, 0.0,    "scheduler_config.watermark", "share of the cache kept free when requests are admitted"),
        F("--prefill-schedule-interval",  INT,   1,      "scheduler_config.prefill_schedule_interval", "spacing of prompts", NO_RANKS),
        F("--disable-hybrid-kv-cache-manager", BOOL, None, "scheduler_config.disable_hybrid_kv_cache_manager", "store layers with a window like full ones"),
        F("--async-scheduling",           BOOL,  None,   "scheduler_config.async_scheduling", "plan a step, and send what the last one made, while another runs; default: off on a CPU, whose cores are all the model's, and on elsewhere"),
        F("--stream-interval",            INT,   1,      "scheduler_config.stream_interval", "tokens per streamed piece"),
    ),
    "LoRA": (
        F("--enable-lora",                BOOL,  None,   "", "serve LoRA adapters of the model beside it"),
        F("--max-loras",                  INT,   1,      "lora_config.max_loras", "adapters in one batch"),
        F("--max-lora-rank",              INT,   16,     "lora_config.max_lora_rank", "largest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512"),
        F("--lora-dtype",                 STR,   "auto", "lora_config.lora_dtype", "number format of adapters: auto (the model's), float16 or bfloat16"),
        F("--max-cpu-loras",              INT,   None,   "lora_config.max_cpu_loras", "adapters kept in memory; default: as many as in a batch"),
        F("--fully-sharded-loras",        BOOL,  False,  "lora_config.fully_sharded_loras", "shard both halves", NO_SHARDED_LORA),
        F("--lora-target-modules",        WORDS, None,   "lora_config.target_modules", "last parts of the names of the only modules that adapters may change (q_proj v_proj); default: all that can"),
        F("--default-mm-loras",           JSON,  None,   "lora_config.default_mm_loras", "adapter per media kind", NO_MEDIA_LORA),
        F("--enable-tower-connector-lora", BOOL, False,  "lora_config.enable_tower_connector_lora", "vision tower", NO_MEDIA_LORA),
        F("--specialize-active-lora",     BOOL,  False,  "lora_config.specialize_active_lora", "graphs per count", NO_GRAPHS),
        F("--enable-mixed-moe-lora-format", BOOL, False, "", "expert wrapper", NO_EXPERT_LORA),
        F("--enable-moe-shared-loras",    BOOL,  False,  "", "shared layout", NO_EXPERT_LORA),
        F("--max-lora-cls-labels",        INT,   None,   "lora_config.max_lora_cls_labels", "head size", "adapters with a head of their own are not supported"),
    ),
    "Multimodal": (
        F("--language-model-only",        BOOL,  False,  "", "serve a model that takes media without them"),
        F("--limit-mm-per-prompt",        JSON,  {},     "", "modality -> how many items one prompt may have, as JSON"),
        F("--enable-mm-embeds",           BOOL,  False,  "", "embeddings as media", NO_MEDIA),
        F("--media-io-kwargs",            JSON,  {},     "", "modality -> how items are read, as JSON; image: image_mode, rgba_background_color"),
        F("--mm-processor-kwargs",        JSON,  None,   "", "options of the model's processor, as JSON"),
        F("--mm-processor-cache-gb",      FLOAT, 4,      "", "memory for processed media that come again; 0 = none"),
        F("--mm-processor-cache-type",    ("lru", "shm"), "lru", "", "cache kind", NO_MEDIA),
        F("--mm-hasher-algorithm",        ("blake3", "sha256", "sha512"), "blake3", "", "what names media; blake3 where that package is installed, else sha256"),
        F("--mm-shm-cache-max-object-size-mb", INT, 128, "", "cache limit", NO_MEDIA),
        F("--mm-encoder-only",            BOOL,  False,  "", "encoder instance", NO_MEDIA),
        F("--mm-encoder-tp-mode",         ("weights", "data"), "weights", "", "tower ranks", NO_MEDIA),
        F("--mm-encoder-attn-backend",    STR,   None,   "", "tower attention", NO_MEDIA),
        F("--interleave-mm-strings",      BOOL,  False,  "", "keep media where they stand in a message, for templates that take text only"),
        F("--skip-mm-profiling",          BOOL,  False,  "", "no media in memory profiling", NEVER + "room for the KV cache is found without a profiling run"),
        F("--video-pruning-rate",         FLOAT, None,   "", "drop video tokens", NO_MEDIA),
        F("--video-pruning-method",       STR,   "evs",  "", "how", NO_MEDIA),
        F("--mm-tensor-ipc",              STR,   "direct_rpc", "", "how tensors cross", NO_MEDIA),
        F("--mm-processor-device",        STR,   "auto", "", "processor device", NO_MEDIA),
        F("--mm-device-do-normalize",     BOOL,  None,   "", "normalise on device", NO_MEDIA),
        F("--trust-request-mm-kwargs",    BOOL,  False,  "", "let requests bring mm_processor_kwargs and media_io_kwargs"),
        F("--mm-encoder-attn-dtype",      STR,   None,   "", "", NEVER + "there is no fp8 vision tower"),
        F("--mm-encoder-fp8-scale-path",  STR,   None,   "", "", NEVER + "there is no fp8 vision tower"),
        F("--mm-encoder-fp8-scale-save-path", STR, None, "", "", NEVER + "there is no fp8 vision tower"),
        F("--mm-encoder-fp8-scale-save-margin", FLOAT, 1.5, "", "", NEVER + "there is no fp8 vision tower"),
        F("--mm-ipc-gpu-memory-gb",       FLOAT, 0,      "", "", NEVER + "there is no media pool on a device", (0.0,)),
    ),
    "Structured outputs, reasoning, tools": (
        F("--structured-outputs-config",  JSON,  None,   "structured_outputs_config", "grammar settings"),
        F("--reasoning-parser",           STR,   "",     "structured_outputs_config.reasoning_parser", "tells the model's reasoning from its answer: a parser's name"),
        F("--reasoning-parser-plugin",    STR,   "",     "structured_outputs_config.reasoning_parser_plugin", "a module or a .py file that registers reasoning parsers"),
        F("--reasoning-config",           JSON,  None,   "reasoning_config", "budget delimiters", NO_BUDGET),
        F("--enable-auto-tool-choice",    BOOL,  False,  "", "let the model decide to call tools, read by --tool-call-parser"),
        F("--tool-call-parser",           STR,   None,   "", "reads tool calls in the format the model was trained on: a parser's name"),
        F("--tool-parser-plugin",         STR,   "",     "", "a module or a .py file that registers tool parsers"),
        F("--tool-strict-level",          STR,   "auto", "", "how strict", "calls are only held to a schema by tool_choice required or a named function"),
        F("--exclude-tools-when-tool-choice-none", BOOL, False, "", "do not show the model tools that it may not call"),
        F("--tool-server",                STR,   None,   "", "MCP servers", "tools run at the client: no tool server is asked"),
    ),
    "Speculative decoding": (
        F("--speculative-config -sc",     JSON,  None,   "speculative_config", "draft settings", NO_SPEC),
        F("--spec-method",                STR,   None,   "", "method", NO_SPEC),
        F("--spec-model",                 STR,   None,   "", "draft model", NO_SPEC),
        F("--spec-tokens",                INT,   None,   "", "draft length", NO_SPEC),
    ),
    "Transfer and events": (
        F("--kv-transfer-config",         JSON,  None,   "kv_transfer_config", "KV connector", NO_TRANSFER),
        F("--kv-events-config",           JSON,  None,   "kv_events_config", "cache events", LATER),
        F("--ec-transfer-config",         JSON,  None,   "ec_transfer_config", "encoder-cache connector", NO_MEDIA),
        F("--ec-manager-config",          JSON,  None,   "ec_manager_config", "encoder-cache manager", NO_MEDIA),
        F("--tokens-only",                BOOL,  False,  "", "token routes only", LATER),
        F("--enable-scale-out",           BOOL,  False,  "", "split server", LATER),
        F("--weight-transfer-config",     JSON,  None,   "weight_transfer_config", "weight updates", LATER),
    ),
    "Observability and logging": (
        F("--show-hidden-metrics-for-version", STR, None, "observability_config.show_hidden_metrics_for_version", "bring back metrics", "no metric is hidden"),
        F("--otlp-traces-endpoint",       STR,   None,   "observability_config.otlp_traces_endpoint", "OTLP URL", LATER),
        F("--collect-detailed-traces",    CSV,   None,   "observability_config.collect_detailed_traces", "traces", LATER),
        F("--per-request-spec-decode-metrics", ("none", "summary", "detailed"), "none", "observability_config.per_request_spec_decode_metrics", "draft metrics", NO_SPEC),
        F("--kv-cache-metrics",           BOOL,  False,  "observability_config.kv_cache_metrics", "histograms of how long cache blocks live"),
        F("--kv-cache-metrics-sample",    FLOAT, 0.01,   "observability_config.kv_cache_metrics_sample", "share of blocks that are watched"),
        F("--custom-histogram-buckets",   JSON,  None,   "observability_config.custom_histogram_buckets", "JSON: metric family to bucket bounds"),
        F("--enable-mfu-metrics",         BOOL,  False,  "observability_config.enable_mfu_metrics", "FLOPs and bytes", LATER),
        F("--enable-logging-iteration-details", BOOL, False, "observability_config.enable_logging_iteration_details", "per-step log", LATER),
        F("--jit-monitor-mode",           ("warn", "error"), "warn", "observability_config.jit_monitor_mode", "late compilation", "nothing is compiled while serving"),
        F("--jit-monitor-verbose",        BOOL,  False,  "observability_config.jit_monitor_verbose", "details", "nothing is compiled while serving"),
        F("--logging-config",             LoggingConfig, None, "logging_config", "JSON: log_level, formatter (text or json), configure_logging, pylogging_config_file"),
        F("--log-level",                  ("critical", "error", "warning", "info", "debug"), None, "logging_config.log_level", "log level of all processes"),
        F("--log-config-file",            STR,   None,   "logging_config.pylogging_config_file", "Python logging configuration as JSON"),
        F("--disable-log-stats",          BOOL,  None,   "", "no statistics lines"),
        F("--aggregate-engine-logging",   BOOL,  None,   "", "one line of statistics for all replicas instead of one each"),
        F("--enable-log-requests",        BOOL,  False,  "", "log how each request comes, and how it ends"),
        F("--enable-log-outputs",         BOOL,  False,  "", "log outputs too"),
        F("--enable-log-deltas",          BOOL,  True,   "", "log streamed pieces when outputs are logged"),
        F("--max-log-len",                Whole(0), None,   "", "characters or ids of a prompt or output in a log line"),
        F("--profiler-config",            JSON,  None,   "profiler_config", "profiles on request", LATER),
        F("--cudagraph-metrics",          BOOL,  False,  "observability_config.cudagraph_metrics", "", NEVER + "there are no CUDA graphs"),
        F("--enable-layerwise-nvtx-tracing", BOOL, False, "observability_config.enable_layerwise_nvtx_tracing", "", NEVER + "there is no NVTX"),
    ),
    "Compilation and general": (
        F("--compilation-config -cc",     CompilationConfig, None, "compilation_config", "JSON, a mode number, or dotted: --compilation-config.custom_ops+ +rms_norm. Mode 3 compiles the model with torch.compile; on a CPU the default is 0, none"),
        F("--optimization-level",         INT,   2,      "optimization_level", "-O0: compile nothing; -O1, -O2: compile models where that is the default, on GPUs", NO_LEVELS, (0, 1)),
        F("--performance-mode",           STR,   "balanced", "performance_mode", "preset", LATER),
        F("--cudagraph-capture-sizes",    INTS,  None,   "compilation_config.cudagraph_capture_sizes", "numbers of requests that device graphs are captured for; default: 1, 2, 4 and multiples of 8"),
        F("--max-cudagraph-capture-size", Whole(1, 65536),  None,   "compilation_config.max_cudagraph_capture_size", "the largest of them by default; default: 256 or --max-num-seqs"),
        F("--additional-config",          JSON,  {},     "additional_config", "JSON for plugins, in every process"),
        F("--aux-output-config",          JSON,  None,   "aux_output_config", "expert ids", NO_EXPERT_IDS),
        F("--watermark-config",           JSON,  None,   "watermark_config", "watermark", LATER),
        F("--diffusion-config -dc",       JSON,  None,   "diffusion_config", "diffusion models", LATER),
        F("--shutdown-timeout",           INT,   0,      "shutdown_timeout", "seconds that running requests get at the end; 0 ends them at once"),
        F("--fail-on-environ-validation", BOOL,  False,  "", "an unknown VLLM_* variable stops the start"),
        F("--engram-config",              JSON,  None,   "engram_config", "", NEVER + "there are no n-gram tables"),
    ),
    "Hardpoint": (
        F("--plugin-policy",              ("compatible", "strict"), None, "plugins_config.policy", "strict: every plugin that fails or is skipped stops the start; default: HARDPOINT_PLUGIN_POLICY, else compatible"),
        F("--plugin-config",              EACH,  None,   "plugins_config.settings", "NAME.key=value, a plugin's own setting; the value is JSON or text"),
        F("--request-timeout",            FLOAT, None,   "scheduler_config.request_timeout", "seconds a request may take, waiting included; then it ends with an error; default: no limit"),
        F("--cpu-threads",                INT,   None,   "device_config.cpu_threads", "threads that compute, in each worker; default: the processors this process may use"),
    ),
}

FRONT_END: dict[str, tuple[Flag, ...]] = {
    "Server": (
        F("--host",                       STR,   None,   "", "address to listen on; default: all"),
        F("--port",                       Whole(0, 65535), 8000,   "", "port to listen on"),
        F("--uds",                        STR,   None,   "", "Unix socket to listen on instead"),
        F("--uvicorn-log-level",          ("critical", "error", "warning", "info", "debug", "trace"), "info", "", "log level of the HTTP server"),
        F("--disable-uvicorn-access-log", BOOL,  False,  "", "no line per HTTP request"),
        F("--disable-access-log-for-endpoints", STR, None, "", "comma list of paths without such a line"),
        F("--allow-credentials",          BOOL,  False,  "", "CORS: allow credentials"),
        F("--allowed-origins",            JSONLIST, [], "", "CORS: JSON list of origins"),
        F("--allowed-methods",            JSONLIST, ["*"], "", "CORS: JSON list of methods"),
        F("--allowed-headers",            JSONLIST, ["*"], "", "CORS: JSON list of headers"),
        F("--api-key",                    WORDS, None,   "", "accepted keys; repeatable. VLLM_API_KEY is used where it is not given"),
        F("--ssl-keyfile",                STR,   None,   "", "TLS key"),
        F("--ssl-certfile",               STR,   None,   "", "TLS certificate"),
        F("--ssl-ca-certs",               STR,   None,   "", "TLS authorities"),
        F("--enable-ssl-refresh",         BOOL,  False,  "", "reload certificates when they change"),
        F("--ssl-cert-reqs",              Whole(0, 2), 0,      "", "client certificates: 0 none, 1 optional, 2 required"),
        F("--ssl-ciphers",                STR,   None,   "", "TLS ciphers"),
        F("--root-path",                  STR,   None,   "", "path of the server behind a proxy"),
        F("--middleware",                 EACH,  [],     "", "dotted path of ASGI middleware; repeatable, in this order"),
        F("--enable-request-id-headers",  BOOL,  False,  "", "X-Request-Id in answers"),
        F("--disable-fastapi-docs",       BOOL,  False,  "", "no /docs and /openapi.json"),
        F("--enable-offline-docs",        BOOL,  False,  "", "local doc assets", LATER),
        F("--h11-max-incomplete-event-size", Whole(1), 4194304, "", "most bytes of a request's head"),
        F("--h11-max-header-count",       Whole(1), 256,    "", "most headers of a request"),
    ),
    "Requests": (
        F("--chat-template",              STR,   None,   "", "chat template: a file, or the template itself"),
        F("--chat-template-content-format", ("auto", "string", "openai"), "auto", "", "how message content reaches the template"),
        F("--trust-request-chat-template", BOOL, False,  "", "let requests bring their own template"),
        F("--default-chat-template-kwargs", JSON, None,  "", "JSON: defaults of chat_template_kwargs"),
        F("--lora-modules",               WORDS, None,   "", "adapters served from the start: NAME=FOLDER, or JSON with name, path and base_model_name; repeatable"),
        F("--response-role",              STR,   "assistant", "", "role of answers"),
        F("--return-tokens-as-token-ids", BOOL,  False,  "", "token_id:N in place of tokens in log-probabilities"),
        F("--enable-prompt-tokens-details", BOOL, False, "", "prompt_tokens_details in usage"),
        F("--enable-per-request-metrics", BOOL,  False,  "", "metrics in answers"),
        F("--enable-server-load-tracking", BOOL, False,  "", "count requests for /load"),
        F("--enable-force-include-usage", BOOL,  False,  "", "usage in every stream"),
        F("--sse-keep-alive-interval",    Whole(0), 0,      "", "seconds between comment lines in quiet streams; 0 = none"),
        F("--enable-tokenizer-info-endpoint", BOOL, False, "", "serve /tokenizer_info"),
        F("--log-error-stack",            BOOL,  None,   "", "log the stack of errors; default: on with VLLM_SERVER_DEV_MODE"),
        F("--fingerprint-mode",           ("full", "hash", "custom", "none"), "full", "", "system_fingerprint of answers"),
        F("--fingerprint-value",          STR,   None,   "", "its text in mode custom"),
        F("--enable-flash-late-interaction", BOOL, True, "", "", NEVER + "late interaction is computed one way"),
        F("--cohere-is-reasoning-model",  BOOL,  True,   "", "Cohere API", LATER),
        F("--cohere-format",              STR,   "cmd4", "", "Cohere API", LATER),
        F("--anthropic-disabled-thinking-effort", STR, "auto", "", "Messages API", LATER),
    ),
    "Processes": (
        F("--headless",                   BOOL,  False,  "", "the engine without an HTTP server, for a server with --data-parallel-size-local 0 that uses it"),
        F("--api-server-count -asc",      Whole(1, 1024), None,   "", "API server processes that share the port and the engine; default: 1, which is this process"),
        F("--grpc",                       BOOL,  False,  "", "", NEVER + "there is no gRPC server"),
        F("--grpc-port",                  INT,   None,   "", "", NEVER + "there is no gRPC server"),
        F("--data-parallel-supervisor-port", INT, 9256,  "", "", NEVER + "there is no supervisor with a port per rank"),
        F("--dp-supervisor-probe-interval-s", FLOAT, 5.0, "", "", NEVER + "there is no supervisor with a port per rank"),
        F("--dp-supervisor-probe-timeout-s", FLOAT, 5.0, "", "", NEVER + "there is no supervisor with a port per rank"),
        F("--dp-supervisor-probe-failure-threshold", INT, 3, "", "", NEVER + "there is no supervisor with a port per rank"),
    ),
}
# fmt: on

ENGINE_FLAGS = tuple(flag for group in GROUPS.values() for flag in group)
FRONT_END_FLAGS = tuple(flag for group in FRONT_END.values() for flag in group)
FLAGS = (*ENGINE_FLAGS, *FRONT_END_FLAGS)
BY_DEST = {flag.dest: flag for flag in FLAGS}


def flag_behind(text: str) -> str:
    """The flag of the field that an error begins with, as in "cache_config.block_size is 0"; empty if there is none."""
    path = text.partition(" ")[0].partition("=")[0]
    return next((flag.names[0] for flag in FLAGS if path and f".{flag.field}".endswith(f".{path}")), "")


MODEL = Flag(("--model",), STR, DEFAULT_MODEL, "model_config.model", "the model")
