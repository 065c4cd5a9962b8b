"""THE TABLE: every extension point is one row here. Strings and enums only.

GROUPS          entry-point groups, loaded by `boot`
REGISTRIES      named entries, filled by plugins and by `builtins`
CONFIG_HOOKS    config fields that name the user's class
PLATFORM_HOOKS  methods of the active platform
"""

from __future__ import annotations

from hardpoint.extensions.rows import (
    Allow,
    Case,
    Check,
    ConfigHook,
    Duplicate,
    Fault,
    Group,
    PlatformHook,
    Registry,
    Role,
    Row,
    Shape,
    State,
    Then,
    Value,
)

FE, EC, W, INS, ALL = Role.FRONT_END, Role.ENGINE_CORE, Role.WORKER, Role.INSPECTOR, Role.ALL
BUILT, PLANNED = State.BUILT, State.PLANNED
FUNCTION, FACTORY, CLASS, REF, OBJECT = Value.FUNCTION, Value.FACTORY, Value.CLASS, Value.REF, Value.OBJECT
QUIET, WARN, REFUSE, ASSERT, KEY_ERR = (
    Duplicate.REPLACE_QUIET,
    Duplicate.REPLACE_WARN,
    Duplicate.REFUSE,
    Duplicate.ASSERT,
    Duplicate.KEY_ERROR,
)
NOTHING, A_CLASS, SUB_VALUE, SUB_TYPE = (
    Check.NOTHING,
    Check.A_CLASS,
    Check.SUBCLASS_VALUE_ERROR,
    Check.SUBCLASS_TYPE_ERROR,
)
EXACT, ANY = Case.EXACT, Case.ANY

# fmt: off
GROUPS = (
    #     key                  entry-point group            value     then                   allow-list      import fails              call fails               wrong type              roles   contract                                                  state
    Group("general",           "vllm.general_plugins",      FUNCTION, Then.CALL,             Allow.OPTIONAL, Fault.SKIP_ERROR,         Fault.STOP,              Fault.STOP,             ALL,    "",                                                       BUILT),
    Group("platforms",         "vllm.platform_plugins",     FUNCTION, Then.ACTIVATE,         Allow.OPTIONAL, Fault.SKIP_WARNING,       Fault.SKIP_UNLESS_NAMED, Fault.STOP,             ALL,    "hardpoint.contracts.platform:Platform",                  BUILT),
    Group("stat_loggers",      "vllm.stat_logger_plugins",  CLASS,    Then.BUILD_PER_ENGINE, Allow.OPTIONAL, Fault.SKIP_ERROR,         Fault.NEVER,             Fault.STOP_TYPE_ERROR,  FE,     "hardpoint.contracts.stat_logger:StatLoggerBase",         BUILT),
    Group("endpoints",         "vllm.endpoint_plugins",     FACTORY,  Then.CALL_FOR_OBJECT,  Allow.REQUIRED, Fault.SKIP_ERROR,         Fault.SKIP_ERROR,        Fault.SKIP_ERROR,       FE,     "hardpoint.contracts.endpoint_plugin:EndpointPlugin",     BUILT),
    Group("io_processors",     "vllm.io_processor_plugins", FUNCTION, Then.CALL_FOR_REF,     Allow.OPTIONAL, Fault.SKIP_ERROR,         Fault.SKIP_WARNING,      Fault.SKIP_WARNING,     FE,     "hardpoint.contracts.io_processor:IOProcessor",           BUILT),
    Group("request_hooks",     "hardpoint.request_hooks", CLASS,    Then.BUILD_PER_ENGINE, Allow.OPTIONAL, Fault.STOP,               Fault.NEVER,             Fault.STOP_TYPE_ERROR,  FE,     "hardpoint.contracts.request_hook:RequestHook",           BUILT),
    Group("logits_processors", "vllm.logits_processors",    CLASS,    Then.USE,              Allow.IGNORED,  Fault.STOP_RUNTIME_ERROR, Fault.NEVER,             Fault.STOP_VALUE_ERROR, FE | W, "hardpoint.contracts.logits_processor:LogitsProcessorV2", BUILT),
)

REGISTRIES = (
    #        key                           contract                                                         takes        check      base class                                              duplicate strict   case   chosen by                                    read in            state
    Registry("models",                     "hardpoint.contracts.model:VllmModel",                           CLASS | REF, SUB_TYPE,  "torch.nn:Module",                                      QUIET,    QUIET,   EXACT, "architectures of the model's config",       FE | EC | W | INS, BUILT),
    Registry("oot_ops",                    "hardpoint.contracts.custom_op:CustomOp",                        CLASS,       A_CLASS,   "",                                                     ASSERT,   ASSERT,  EXACT, "class name; custom_ops switches it on",     W,                 BUILT),
    Registry("pluggable_layers",           "hardpoint.contracts.custom_op:PluggableLayer",                  CLASS,       A_CLASS,   "",                                                     ASSERT,   ASSERT,  EXACT, "class name",                                W,                 BUILT),
    Registry("attention_backends",         "hardpoint.contracts.attention_backend:AttentionBackend",        CLASS | REF, NOTHING,   "",                                                     QUIET,    REFUSE,  ANY,   "--attention-backend, else the platform",    FE | W,            BUILT),
    Registry("quantization_methods",       "hardpoint.contracts.quantization:QuantizationConfig",           CLASS | REF, SUB_VALUE, "hardpoint.contracts.quantization:QuantizationConfig",  QUIET,    QUIET,   ANY,   "--quantization, else the model's files",    FE | W,            BUILT),
    Registry("model_loaders",              "hardpoint.contracts.model_loader:BaseModelLoader",              CLASS | REF, SUB_VALUE, "hardpoint.contracts.model_loader:BaseModelLoader",     WARN,     WARN,    ANY,   "--load-format",                             W,                 BUILT),
    Registry("kv_connectors",              "hardpoint.contracts.kv_connector:KVConnectorBase_V1",           CLASS | REF, NOTHING,   "",                                                     REFUSE,   REFUSE,  EXACT, "--kv-transfer-config kv_connector",         FE | EC | W,       PLANNED),
    Registry("ec_connectors",              "hardpoint.contracts.ec_connector:ECConnectorBase",              CLASS | REF, NOTHING,   "",                                                     REFUSE,   REFUSE,  EXACT, "--ec-transfer-config ec_connector",         FE | EC | W,       PLANNED),
    Registry("kv_offloading_specs",        "hardpoint.contracts.kv_offloading:OffloadingSpec",              CLASS | REF, NOTHING,   "",                                                     REFUSE,   REFUSE,  EXACT, "spec_name of the connector's extra config", FE | EC | W,       PLANNED),
    Registry("tool_parsers",               "hardpoint.contracts.tool_parser:ToolParser",                    CLASS | REF, SUB_TYPE,  "hardpoint.contracts.tool_parser:ToolParser",           QUIET,    KEY_ERR, EXACT, "--tool-call-parser",                        FE,                BUILT),
    Registry("reasoning_parsers",          "hardpoint.contracts.reasoning_parser:ReasoningParser",          CLASS | REF, SUB_TYPE,  "hardpoint.contracts.reasoning_parser:ReasoningParser", QUIET,    KEY_ERR, EXACT, "--reasoning-parser",                        FE | EC,           BUILT),
    Registry("lora_resolvers",             "hardpoint.contracts.lora_resolver:LoRAResolver",                OBJECT,      NOTHING,   "",                                                     WARN,     WARN,    EXACT, "all in order, first answer",                FE,                BUILT),
    Registry("sleep_mode_backends",        "hardpoint.contracts.sleep_mode:SleepModeBackend",               CLASS | REF, NOTHING,   "",                                                     REFUSE,   REFUSE,  EXACT, "model_config.sleep_mode_backend",           W,                 PLANNED),
    Registry("kv_cache_dtypes",            "hardpoint.contracts.kv_cache_dtype:KVCacheDtypeHandler",        CLASS | REF, A_CLASS,   "",                                                     WARN,     WARN,    EXACT, "--kv-cache-dtype",                          FE | EC | W | INS, PLANNED),
    Registry("structured_output_backends", "hardpoint.contracts.structured_output:StructuredOutputBackend", CLASS | REF, NOTHING,   "",                                                     REFUSE,   REFUSE,  EXACT, "structured_outputs_config.backend",         EC,                BUILT),
    Registry("draft_proposers",            "hardpoint.contracts.draft_proposer:DraftProposer",              CLASS | REF, NOTHING,   "",                                                     REFUSE,   REFUSE,  EXACT, "--speculative-config method",               FE | W,            PLANNED),
)

CONFIG_HOOKS = (
    #          key                         field of VllmConfig                                  flag                              shape                      words of ours contract                                                  read in      state
    ConfigHook("scheduler_cls",            "scheduler_config.scheduler_cls",                    "--scheduler-cls",                Shape.DOTTED_OR_CLASS,     "",           "hardpoint.contracts.scheduler:SchedulerInterface",       EC,          BUILT),
    ConfigHook("worker_cls",               "parallel_config.worker_cls",                        "--worker-cls",                   Shape.DOTTED,              "auto",       "hardpoint.contracts.worker:WorkerBase",                  W,           BUILT),
    ConfigHook("worker_extension_cls",     "parallel_config.worker_extension_cls",              "--worker-extension-cls",         Shape.DOTTED,              "",           "",                                                       W,           BUILT),
    ConfigHook("logits_processors",        "model_config.logits_processors",                    "--logits-processors",            Shape.COLON_OR_CLASS_LIST, "",           "hardpoint.contracts.logits_processor:LogitsProcessorV2", FE | W,      BUILT),
    ConfigHook("tool_parser_plugin",       "",                                                  "--tool-parser-plugin",           Shape.MODULE_OR_PATH,      "",           "",                                                       FE,          BUILT),
    ConfigHook("reasoning_parser_plugin",  "structured_outputs_config.reasoning_parser_plugin", "--reasoning-parser-plugin",      Shape.MODULE_OR_PATH,      "",           "",                                                       FE | EC,     BUILT),
    ConfigHook("kv_connector_module_path", "kv_transfer_config.kv_connector_module_path",       "--kv-transfer-config",           Shape.MODULE,              "",           "hardpoint.contracts.kv_connector:KVConnectorBase_V1",    FE | EC | W, PLANNED),
    ConfigHook("ec_connector_module_path", "ec_transfer_config.ec_connector_module_path",       "--ec-transfer-config",           Shape.MODULE,              "",           "hardpoint.contracts.ec_connector:ECConnectorBase",       EC | W,      PLANNED),
    ConfigHook("model_class_overrides",    "model_config.model_class_overrides",                "--model-class-overrides",        Shape.COLON_BY_NAME,       "",           "hardpoint.contracts.model:VllmModel",                    FE | EC | W, BUILT),
    ConfigHook("executor_class",           "parallel_config.distributed_executor_backend",      "--distributed-executor-backend", Shape.DOTTED_OR_CLASS,     "uni mp ray external_launcher", "hardpoint.contracts.executor:Executor",                  FE | EC,     BUILT),
    ConfigHook("custom_proposer",          "speculative_config.model",                          "--speculative-config",           Shape.DOTTED,              "",           "hardpoint.contracts.draft_proposer:DraftProposer",       W,           PLANNED),
    ConfigHook("additional_config",        "additional_config",                                 "--additional-config",            Shape.JSON,                "",           "",                                                       FE | EC | W, BUILT),
)

PLATFORM_HOOKS = (
    #            method of Platform                  moment                                                                                                how often                       called in state
    PlatformHook("pre_register_and_update",          "with the parser when a full serve parser is built; without it at the start of create_engine_config", "each time",                    FE,       BUILT),
    PlatformHook("validate_environ",                 "create_engine_config, after pre_register_and_update",                                                "once",                         FE,       BUILT),
    PlatformHook("apply_config_platform_defaults",   "while the config is resolved, before options are decided",                                           "once per process, idempotent", FE | EC,  BUILT),
    PlatformHook("check_and_update_config",          "while the config is resolved, after options are decided",                                            "once per process, idempotent", FE | EC,  BUILT),
    PlatformHook("register_triton_kernel_overrides", "start of a worker, after the general plugins",                                                       "once per worker",              W,        BUILT),
    PlatformHook("get_device_communicator_cls",      "init_device, when a group of several ranks is made",                                                 "once per group",               W,        BUILT),
    PlatformHook("get_attn_backend_cls",             "load_model, when an attention layer asks for its backend",                                           "once per set of arguments",    W,        BUILT),
    PlatformHook("update_block_size_for_backend",    "right after load_model",                                                                             "once per worker",              W,        BUILT),
    PlatformHook("get_kv_cache_config_builder_cls",  "when the KV cache is planned",                                                                       "once",                         EC,       BUILT),
    PlatformHook("import_kernels",                   "start of a worker, after the general plugins; or earlier, when a plugin imports vllm._custom_ops",   "once per process",             ALL,      BUILT),
)
# fmt: on

ROWS: tuple[Row, ...] = (*GROUPS, *REGISTRIES, *CONFIG_HOOKS, *PLATFORM_HOOKS)

_GROUPS = {name: row for row in GROUPS for name in (row.key, row.group)}
_REGISTRIES = {row.key: row for row in REGISTRIES}
_CONFIG_HOOKS = {row.key: row for row in CONFIG_HOOKS}


def group_row(name: str) -> Group:
    """The group with this key or entry-point group name; KeyError when there is none."""
    return _GROUPS[name]


def registry_row(key: str) -> Registry:
    """The registry with this key; KeyError when there is none."""
    return _REGISTRIES[key]


def config_hook_row(key: str) -> ConfigHook:
    """The config hook with this key; KeyError when there is none."""
    return _CONFIG_HOOKS[key]
