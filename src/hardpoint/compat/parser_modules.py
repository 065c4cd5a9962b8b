"""vLLM's modules of parsers, one per format, under their present and their earlier paths."""

from __future__ import annotations

_TOOL_MODULES = (
    "deepseekv3 deepseekv31 deepseekv32 ernie45 glm4_moe glm47_moe granite granite_20b_fc hermes hunyuan_a13b "
    "internlm2 jamba kimi_k2 llama llama4_pythonic longcat minimax minimax_m2 mistral olmo3 openai phi4mini "
    "pythonic qwen3coder qwen3xml seed_oss step3 step3p5 xlam"
)
_REASONING_MODULES = (
    "deepseek_r1 deepseek_v3 ernie45 glm4_moe gptoss granite holo2 hunyuan_a13b identity kimi_k2 minimax_m2 mistral "
    "nemotron_v3 olmo3 qwen3 seedoss step3 step3p5"
)
TOOL_PARSER_MODULES = tuple(f"{name}_tool_parser" for name in _TOOL_MODULES.split())
REASONING_PARSER_MODULES = tuple(f"{name}_reasoning_parser" for name in _REASONING_MODULES.split())
