"""Keys of a config.json that change no logit of a language model, whatever their value; a key that is not known is refused by its name."""

from __future__ import annotations

from fnmatch import fnmatchcase

# fmt: off
HARMLESS_KEYS: dict[str, str] = {  # key or pattern: what it is of
    "_name_or_path":               "where the file came from",
    "architectures":               "the classes that the file was saved from; model_type decides",
    "model_type":                  "read before all other keys",
    "transformers_version":        "the version that wrote the file",
    "unsloth_*":                   "a tool that wrote the file",
    "torch_dtype":                 "the type that weights were stored in",
    "dtype":                       "the type that weights were stored in",
    "use_bfloat16":                "the type that weights were stored in",
    "max_position_embeddings":     "the longest sequence; scaled rotary embeddings read it as model.rope",
    "initializer_range":           "initial weights",
    "use_cache":                   "generation: what is kept between tokens",
    "cache_implementation":        "generation: what is kept between tokens",
    "return_dict":                 "the form of the result",
    "output_*":                    "what is returned besides logits",
    "use_return_dict":             "the form of the result",
    "torchscript":                 "the form of the result",
    "id2label":                    "classifiers",
    "label2id":                    "classifiers",
    "num_labels":                  "classifiers",
    "problem_type":                "classifiers",
    "summary_*":                   "classifiers",
    "finetuning_task":             "classifiers",
    "task_specific_params":        "generation by task",
    "*_token_id":                  "ids of special tokens",
    "tokenizer_class":             "the tokenizer",
    "prefix":                      "the tokenizer",
    "n_ctx":                       "GPT-2: as n_positions, not read by transformers",
    "predict_special_tokens":      "GPT-2: of the original code, not read by transformers",
    "gradient_checkpointing":      "recomputation",
    "chunk_size_feed_forward":     "the same products in parts",
    "pretraining_tp":              "the same products in parts",
    "reorder_and_upcast_attn":     "rounding",
    "router_aux_loss_coef":        "the loss of training, which model.aux_loss sets",
    "attn_implementation":         "how attention is computed",
    "_attn_implementation*":       "how attention is computed",
    "_flash_attn_2_enabled":       "how attention is computed",
    "_experts_implementation*":    "how experts are computed",
    "max_length":                  "generation",
    "min_length":                  "generation",
    "do_sample":                   "generation",
    "early_stopping":              "generation",
    "num_beams":                   "generation",
    "num_beam_groups":             "generation",
    "diversity_penalty":           "generation",
    "temperature":                 "generation",
    "top_k":                       "generation",
    "top_p":                       "generation",
    "typical_p":                   "generation",
    "repetition_penalty":          "generation",
    "length_penalty":              "generation",
    "no_repeat_ngram_size":        "generation",
    "encoder_no_repeat_ngram_size": "generation",
    "num_return_sequences":        "generation",
    "remove_invalid_values":       "generation",
    "max_window_layers":           "not read without use_sliding_window",
}
# fmt: on


def is_harmless(key: str) -> bool:
    """Whether a key of a config.json changes no logit, whatever its value."""
    return any(fnmatchcase(key, pattern) for pattern in HARMLESS_KEYS)
