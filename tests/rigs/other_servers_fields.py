"""Names of the fields that other servers document for chat, on any of their routes (2026-11)."""

_OPENAI = (
    *("messages", "model", "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs"),
    *("max_completion_tokens", "max_tokens", "metadata", "modalities", "moderation", "n", "parallel_tool_calls"),
    *("prediction", "presence_penalty", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop", "store", "stream"),
    *("stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity"),
    *("web_search_options", "max_tool_calls", "client_metadata"),
)
_SAMPLING = ("messages", "model", "frequency_penalty", "presence_penalty", "max_tokens", "seed", "stop", "stream")

DOCUMENTED = {
    "OpenAI": _OPENAI,
    "Azure": (*_OPENAI, "data_sources", "user_security_context"),
    "vLLM": (
        *_OPENAI,
        *("best_of", "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids"),
        *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
        *("spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids"),
        *("bad_words", "echo", "add_generation_prompt", "continue_final_message", "add_special_tokens", "documents"),
        *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs", "structured_outputs"),
        *("guided_json", "guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern"),
        *("priority", "request_id", "logits_processors", "return_tokens_as_token_ids", "return_token_ids"),
        *("cache_salt", "kv_transfer_params", "vllm_xargs", "include_reasoning", "thinking_token_budget"),
        "repetition_detection",
    ),
    "SGLang": (
        *_OPENAI,
        *("top_k", "min_p", "min_tokens", "regex", "ebnf", "repetition_penalty", "stop_token_ids", "stop_regex"),
        *("no_stop_trim", "ignore_eos", "continue_final_message", "skip_special_tokens", "lora_path"),
        *("session_params", "separate_reasoning", "stream_reasoning", "chat_template_kwargs", "rid"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "return_hidden_states", "return_routed_experts"),
        *("return_cached_tokens_details", "return_meta_info", "custom_logit_processor", "custom_params"),
        *("cache_salt", "priority", "data_parallel_rank", "max_dynamic_patch", "min_dynamic_patch", "log_metrics"),
        *("routing_key", "image_data"),
    ),
    "llama.cpp": (
        *_OPENAI,
        *("grammar", "json_schema", "dynatemp_range", "dynatemp_exponent", "top_k", "min_p", "n_predict", "n_keep"),
        *("n_discard", "n_indent", "n_cache_reuse", "t_max_predict_ms", "t_max_prompt_ms", "typical_p", "tfs_z"),
        *("repeat_penalty", "repeat_last_n", "penalize_nl", "dry_multiplier", "dry_base", "dry_allowed_length"),
        *("dry_penalty_last_n", "dry_sequence_breakers", "xtc_probability", "xtc_threshold", "mirostat"),
        *("mirostat_tau", "mirostat_eta", "samplers", "cache_prompt", "id_slot", "return_tokens", "min_keep"),
        *("post_sampling_probs", "response_fields", "lora", "timings_per_token", "return_progress"),
        *("reasoning_format", "reasoning_in_content", "parse_tool_calls", "thinking_forced_open"),
        *("chat_template_kwargs", "n_probs", "image_data", "top_n_sigma", "adaptive_target"),
        *("adaptive_decay", "backend_sampling", "speculative.n_max", "speculative.n_min", "speculative.p_min"),
        "ignore_eos",
    ),
    "Ollama": (
        *(*_SAMPLING, "top_p", "temperature", "tools", "think", "options", "keep_alive", "truncate", "shift"),
        *("repeat_penalty", "repeat_last_n", "typical_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta"),
    ),
    "TGI": (
        *(*_SAMPLING, "guideline", "logit_bias", "logprobs", "n", "response_format", "stream_options", "temperature"),
        *("tool_choice", "tool_prompt", "tools", "top_logprobs", "top_p", "typical_p", "watermark", "do_sample"),
        "adapter_id",
    ),
    "LM Studio": (
        *(*_SAMPLING, "top_p", "top_k", "temperature", "logit_bias", "repeat_penalty", "ttl", "draft_model"),
        *("response_format", "tools"),
    ),
    "OpenRouter": (
        *(*_SAMPLING, "response_format", "temperature", "tools", "tool_choice", "top_p", "top_k", "repetition_penalty"),
        *("logit_bias", "logprobs", "top_logprobs", "min_p", "top_a", "prediction", "transforms", "models", "route"),
        *("provider", "user", "debug", "plugins", "reasoning", "include_reasoning", "usage", "verbosity"),
        *("session_id", "trace", "cache_control", "modalities", "image_config", "parallel_tool_calls"),
        *("max_completion_tokens", "metadata"),
    ),
    "DeepSeek": (
        *(*_SAMPLING, "thinking", "response_format", "stream_options", "temperature", "top_p", "tools"),
        *("tool_choice", "logprobs", "top_logprobs", "reasoning_effort", "user_id"),
    ),
}
