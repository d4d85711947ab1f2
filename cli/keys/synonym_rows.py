"""The keys of other trainers and ours, a row for each of ours: Hugging Face's Trainer, Megatron-LM, torchtitan, nanotron, GPT-NeoX,
DeepSpeed, axolotl, Lightning, nanoGPT, torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Synonym:
    """Our key for keys of other trainers, with a note on its meaning; if `key` is "", the note says where the value comes from.

    `values` maps their values to ours; a value that is not in it has no equivalent. None: values are the same.
    """

    names: tuple[str, ...]
    key: str
    note: str = ""
    values: Mapping[str, str] | None = None


YES = {"true": "true", "false": "false"}
FP8_FORMATS = dict.fromkeys(("true", "hybrid", "e4m3", "tensorwise", "rowwise"), "fp8")
# fmt: off
OPTIMIZERS = {
    **{each: each for each in ("adamw", "sgd", "muon")}, "adam": "adamw", "AdamW": "adamw", "Muon": "muon",
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "distributed_fused_adam", "fused_adam"), "adamw"),
}
MOMENTS = {
    **{each: each for each in ("fp32", "bf16", "int8")},
    "float32": "fp32", "torch.float32": "fp32", "bfloat16": "bf16", "torch.bfloat16": "bf16",
}
LR_SCHEDULE_SYNONYMS = {each: each for each in ("constant", "linear", "cosine", "wsd")}
DECAYS = {
    **LR_SCHEDULE_SYNONYMS, "WSD": "wsd", "warmup_stable_decay": "wsd", "constant_with_warmup": "constant",
    "WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "CosineAnnealing": "cosine",
}
PRECISION_SYNONYMS = {
    **{each: each for each in ("fp32", "bf16", "fp16")}, "no": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16",
}
# fmt: on


def _row(names: str, key: str, note: str = "", values: Mapping[str, str] | None = None) -> Synonym:
    return Synonym(names=tuple(names.split()), key=key, note=note, values=values)


# fmt: off
ROWS: tuple[Synonym, ...] = (
    # batch and length
    _row("batch_size global_batch_size train_batch_size total_batch_size", "train.batch", "sequences in a step, over all GPUs"),
    _row("micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size per_device_batch_size local_batch_size "
         "device_batch_size per_gpu_train_batch_size",
         "train.microbatch", "sequences that a GPU computes at once; train.batch counts those of a whole step, over all GPUs"),
    _row("gradient_accumulation_steps accumulate_grad_batches grad_accum grad_accum_steps gradient_accumulation "
         "batch_accumulation_per_replica", "", "it follows from train.batch / (dp x train.microbatch)"),
    _row("per_device_eval_batch_size eval_batch_size", "", "validation uses train.microbatch too"),
    _row("seq_len seq_length sequence_length sequence_len max_seq_length max_seq_len max_length block_size context_length ctx_len "
         "encoder_seq_length",
         "train.seq", "tokens in a sequence"),
    _row("max_steps train_steps train_iters max_iters num_steps total_steps num_train_steps training_steps training.steps", "train.steps"),
    _row("max_tokens train_tokens total_tokens num_tokens", "train.tokens"),
    _row("train_samples", "train.tokens", "SAMPLES x train.seq", {}),
    _row("rampup_batch_size batch_size_rampup rampup", "train.rampup.batch",
         "START; INCREMENT is train.rampup.by, and train.rampup.until is in tokens: SAMPLES x train.seq", {}),
    _row("num_train_epochs epochs num_epochs max_epochs", "", "train.steps or train.tokens sets the length of a run"),
    _row("packing sample_packing eval_sample_packing pad_to_sequence_len group_by_length", "",
         "always: text is cut into full sequences, whole examples are packed into one"),
    _row("dataloader_drop_last drop_last", "", "every batch is full"),
    _row("early_stopping early_stopping_patience", "", "a run goes on to its length; Ctrl-C saves and stops it"),
    # optimizer
    _row("ema_decay ema_beta model_ema_decay ema_max_decay ema.decay", "optim.ema", "the decay of an average of the weights"),
    _row("use_ema model_ema use_ema_weights ema.enable", "optim.ema", "the decay of an average of the weights, 0.999", {}),
    _row("label_smoothing_factor", "train.preference.label_smoothing", "of preferences alone", {}),
    _row("learning_rate base_lr peak_lr max_lr warmup_max_lr lr train.lr training.lr optimizer.lr optimizer.params.lr", "optim.lr"),
    _row("lr_scheduler_type lr_scheduler lr_decay_style lr_schedule scheduler decay_type scheduler.type sched.name",
         "optim.schedule", "", DECAYS),
    _row("warmup_steps warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps warmup_num_steps", "optim.warmup", "steps"),
    _row("warmup_ratio lr_warmup_fraction warmup_fraction", "optim.warmup", "in steps, not a share of train.steps", {}),
    _row("final_lr min_learning_rate eta_min", "optim.min_lr"),
    _row("lr_min min_lr_factor min_lr_ratio", "optim.min_lr", "a rate, not a share of optim.lr", {}),
    _row("lr_decay_iters decay_steps lr_decay_steps", "", "the schedule ends with the run; optim.schedule and optim.min_lr set its form"),
    _row("adam_beta1 beta1 adam_beta2 beta2", "optim.betas", "both, as optim.betas=[0.9,0.95]", {}),
    _row("adam_epsilon adam_eps epsilon", "optim.eps"),
    _row("optimizer_type optimizer_name optimizer.name optimizer.type", "optim.name", "", OPTIMIZERS),
    _row("optimizer", "optim", "an option: `distrain ls optim` lists them", OPTIMIZERS),
    _row("wd", "optim.weight_decay"),
    _row("exp_avg_dtype exp_avg_sq_dtype", "optim.moments", "of all moments", MOMENTS),
    _row("bf16_optimizer_states", "optim.moments", "weights that are stepped stay fp32", {"true": "bf16", "false": "fp32"}),
    _row("use_8bit_adam adam_8bit use_8bit_optimizer optim_bits", "optim.moments", "", {"true": "int8", "8": "int8", "32": "fp32"}),
    _row("use_precision_aware_optimizer", "optim.moments", "fp32, bf16 or int8: the type of all moments", {"false": "fp32"}),
    _row("max_grad_norm gradient_clipping clip_grad grad_clip gradient_clip_val clip_grad_norm grad_norm_clip max_norm", "train.clip",
         "global norm of the gradients"),
    # precision, memory, speed
    _row("mixed_precision trainer.precision dtype torch_dtype mixed_precision_param compute_dtype",
         "train.precision", "", PRECISION_SYNONYMS),
    _row("fp8 fp8_format float8.recipe_name", "train.precision", "fp8", FP8_FORMATS),
    _row("grad_accum_dtype", "train.gradients", "", PRECISION_SYNONYMS),
    _row("accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32", "train.gradients", "", {"true": "fp32"}),
    _row("full_determinism deterministic_mode use_deterministic_algorithms", "train.deterministic", "", YES),
    _row("bf16 bf16.enabled", "train.precision", "", {"true": "bf16", "auto": "auto", "{enabled:true}": "bf16"}),
    _row("fp16 fp16.enabled half", "train.precision", "", {"true": "fp16", "{enabled:true}": "fp16"}),
    _row("gradient_checkpointing activation_checkpointing activation_checkpoint checkpoint_activations recompute_activations",
         "parallel.recompute", "none, selective or full", {"true": "full", "false": "none", "full": "full", "selective": "selective"}),
    _row("recompute_granularity activations_checkpoint_granularity activation_checkpoint.mode recompute_method",
         "parallel.recompute", "none, selective or full",
         {"full": "full", "selective": "selective", "none": "none"}),
    _row("flash_attention use_flash_attn use_flash_attention use_flash_attention_2 flash_attn", "train.attention", "flash or math",
         {"true": "flash", "false": "math"}),
    _row("attn_implementation", "train.attention", "flash or math", {"flash_attention_2": "flash", "sdpa": "flash", "eager": "math"}),
    _row("torch_compile use_compile training.compile compile.enable", "train.compile", "", YES),
    _row("num_output_chunks num_loss_chunks", "train.loss_chunks", "chunks of the vocabulary"),
    _row("use_liger_kernel liger_fused_linear_cross_entropy fused_linear_cross_entropy cut_cross_entropy", "train.loss_chunks",
         "chunks of the vocabulary", {"true": "8", "false": "1"}),
    _row("sigma_factor", "train.skip_spikes", "deviations"),
    _row("skip_step_optimizer", "train.skip_spikes", "deviations above recent steps, such as 6", {}),
    _row("z_loss_multiplier z_loss_weight lm_z_loss", "train.z_loss"),
    _row("dpo_beta pref_beta rl_beta ref_policy_kl_penalty", "train.preference.beta", "with data=preferences"),
    _row("preference_loss pref_loss loss_type rl", "train.preference.loss", "dpo, ipo or simpo, with data=preferences",
         {"sigmoid": "dpo", "dpo": "dpo", "ipo": "ipo", "simpo": "simpo"}),
    _row("dpo_label_smoothing", "train.preference.label_smoothing", "with data=preferences"),
    _row("simpo_gamma gamma_beta_ratio", "train.preference.margin", "gamma itself, not divided by beta", {}),
    _row("rpo_alpha pref_ftx sft_loss_weight cpo_alpha", "train.preference.nll_weight", "with data=preferences"),
    _row("init_method_std initializer_range init_std init_stdev", "model.init.std"),
    _row("mup_base_hidden_size mup_width use_mup base_hidden_size", "optim.mup", "the width for which lr was found", {}),
    _row("random_seed", "train.seed"),
    # layout
    _row("tensor_parallel_size tensor_model_parallel_size tp_size tensor_parallel_degree tensor_parallel "
         "model_parallel_size autotp_size", "parallel.tp"),
    _row("pipeline_parallel_size pipeline_model_parallel_size pp_size pipeline_parallel_degree pipe_parallel_size pipeline_parallel",
         "parallel.pp"),
    _row("context_parallel_size context_parallel_degree cp_size context_parallel", "parallel.cp"),
    _row("ulysses_degree ulysses_size ulysses_sequence_parallel_size sequence_parallel_size", "parallel.cp",
         "with parallel.cp_comm=all_to_all"),
    _row("cp_comm_type", "parallel.cp_comm", "all_gather or all_to_all",
         {"a2a": "all_to_all", "allgather": "all_gather", "all_gather": "all_gather", "p2p": "all_gather"}),
    _row("context_parallel_rotate_method", "parallel.cp_comm", "its alltoall exchanges keys and values; all_to_all here exchanges heads",
         {"allgather": "all_gather"}),
    _row("expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size expert_parallel", "parallel.ep"),
    _row("data_parallel_size dp_size data_parallel_degree data_parallel", "parallel.dp", "auto: all ranks that the other axes leave"),
    _row("data_parallel_shard_degree", "parallel.shard", "ranks over which parallel.zero=3 shards; -1: parallel.zero=3 alone"),
    _row("data_parallel_replicate_degree", "", "it follows from parallel.dp / parallel.shard"),
    _row("delay_steps gradient_delay stale_steps", "parallel.staleness", "steps that pass before a sum of gradients is used"),
    _row("sync_steps sync_every local_steps inner_steps", "parallel.sync.every", "steps that replicas take alone"),
    _row("outer_lr outer_learning_rate", "parallel.sync.outer.lr"),
    _row("outer_momentum", "parallel.sync.outer.momentum"),
    _row("sequence_parallel", "parallel.sequence", "", YES),
    _row("virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage virtual_pp", "parallel.chunks",
         "groups of layers on a stage, for parallel.schedule=interleaved", {}),
    _row("num_virtual_stages_per_pipeline_rank", "parallel.chunks", "for parallel.schedule=interleaved"),
    _row("decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_parallel_split_points "
         "pipeline_parallel_layers_per_stage pipeline_model_parallel_layout", "parallel.stages", "a list: the layers of each stage", {}),
    _row("pipeline_parallel_schedule_csv", "parallel.schedule", "the path of the file"),
    _row("pipeline_parallel_microbatch_size", "train.microbatch", "sequences that a stage computes at once"),
    _row("pipeline_parallel_schedule pp_engine", "parallel.schedule", "",
         {"1F1B": "1f1b", "1f1b": "1f1b", "gpipe": "gpipe", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "afab": "gpipe"}),
    _row("fsdp fully_sharded full_shard fsdp_config", "parallel.zero", "3 shards weights, gradients and the optimizer",
         {"true": "3", "full_shard": "3", "shard_grad_op": "2", "false": "0"}),
    _row("use_torch_fsdp2 use_megatron_fsdp use_custom_fsdp", "parallel.zero", "3 shards weights, gradients and the optimizer",
         {"true": "3"}),
    _row("zero_optimization zero_stage zero_optimization.stage zero_optimization_stage", "parallel.zero", "0 to 3",
         {**{str(stage): str(stage) for stage in range(4)}, **{f"{{stage:{stage}}}": str(stage) for stage in range(4)}}),
    _row("use_distributed_optimizer distributed_optimizer", "parallel.zero", "1 shards the optimizer", {"true": "1", "false": "0"}),
    _row("offload_optimizer cpu_offload optimizer_offload optimizer_cpu_offload enable_cpu_offload", "parallel.offload.optimizer", "", YES),
    _row("offload_optimizer.device", "parallel.offload.optimizer", "", {"cpu": "true", "none": "false"}),
    _row("offload_param.device", "parallel.offload.parameters", "", {"cpu": "true", "none": "false"}),
    _row("offload_param offload_params param_offload", "parallel.offload.parameters", "", YES),
    _row("overlap_comm overlap_grad_reduce", "parallel.overlap.data", "", YES),
    _row("reduce_bucket_size allgather_bucket_size bucket_size", "parallel.bucket", "elements"),
    _row("ddp_bucket_cap_mb", "parallel.bucket", "elements, not MB", {}),
    _row("ddp distributed_strategy strategy", "parallel", "an option: `distrain ls parallel` lists them",
         {"ddp": "default", "fsdp": "zero3", "deepspeed_stage_1": "zero1", "deepspeed_stage_2": "zero2", "deepspeed_stage_3": "zero3"}),
    # machines
    _row("nproc_per_node num_gpus gpus_per_node n_gpu num_gpus_per_node devices nproc ngpus", "cluster.gpus", "GPUs in a node"),
    _row("nnodes num_nodes n_nodes", "cluster.nodes"),
    _row("world_size", "", "it is cluster.nodes x cluster.gpus, as cluster=NODESxGPUS"),
    _row("master_addr", "launch.address"),
    _row("master_port", "launch.port"),
    _row("max_restarts", "launch.restarts"),
    _row("spare_nodes num_spare_nodes spare_hosts hot_spares", "launch.spares", "hosts beyond the cluster's nodes"),
    _row("deepspeed deepspeed_config", "", "distrain writes it: `distrain show --engine` prints it, and parallel.zero sets its stage"),
    # model
    _row("n_layer n_layers num_layers num_hidden_layers", "model.layers"),
    _row("n_embd hidden_size d_model dim hidden_dim embed_dim", "model.hidden"),
    _row("n_head n_heads num_heads num_attention_heads attention_heads", "model.heads"),
    _row("n_kv_heads num_key_value_heads num_query_groups num_kv_heads", "model.kv_heads"),
    _row("kv_channels", "model.head_dim"),
    _row("intermediate_size ffn_hidden_size n_inner d_ff ffn_dim mlp_dim", "model.ffn"),
    _row("vocab_size padded_vocab_size", "model.vocab"),
    _row("make_vocab_size_divisible_by", "model.vocab_multiple"),
    _row("max_position_embeddings n_positions n_ctx", "model.context",
         "rows of a learned position table; train.seq is a sequence's length"),
    _row("num_experts num_local_experts n_routed_experts moe_num_experts", "model.experts"),
    _row("moe_router_topk num_experts_per_tok moe_top_k router_topk", "model.top_k"),
    _row("moe_router_score_function scoring_func score_func", "model.router.score"),
    _row("norm_topk_prob moe_norm_topk_prob route_norm", "model.router.normalize", "", YES),
    _row("routed_scaling_factor moe_router_topk_scaling_factor route_scale", "model.router.scale"),
    _row("n_group moe_router_num_groups num_expert_groups", "model.router.groups"),
    _row("topk_group moe_router_group_topk num_limited_groups", "model.router.top_groups"),
    _row("moe_router_enable_expert_bias e_score_correction_bias", "model.router.bias", "", YES),
    _row("moe_router_bias_update_rate", "model.router.bias_rate"),
    _row("moe_intermediate_size moe_ffn_hidden_size", "model.expert_ffn"),
    _row("moe_z_loss_coeff router_z_loss_coef router_z_loss_coeff moe_zloss_weight", "model.router.z_loss"),
    _row("moe_aux_loss_coeff router_aux_loss_coef", "model.aux_loss"),
    _row("mtp_num_layers num_nextn_predict_layers num_mtp_layers mtp_layers nextn_predict_layers", "model.mtp.layers"),
    _row("mtp_loss_scaling_factor mtp_loss_weight mtp_loss_coeff", "model.mtp.weight", "Megatron-LM's default is 0.1"),
    _row("linear_attention_freq", "model.full_attention_interval", "of Megatron-LM: the last of this many layers has full attention"),
    _row("rope_theta rotary_base rotary_emb_base", "model.rope_base"),
    _row("partial_rotary_factor rotary_percent rotary_pct", "model.rope_share"),
    _row("sliding_window window_size attention_window", "model.window"),
    _row("rope_scaling rope_type rope_parameters", "model.rope.type"),
    _row("rope_scaling_factor rotary_scaling_factor", "model.rope.factor"),
    _row("position_embedding_type", "model.positions", "",
         {"learned_absolute": "learned", "absolute": "learned", "rope": "rope", "none": "none"}),
    _row("swiglu", "model.act", "", {"true": "swiglu"}),
    _row("moe_expert_capacity_factor", "model.capacity", "of each sequence"),
    _row("hidden_act", "model.act", "", {"silu": "swiglu", "gelu": "gelu"}),  # silu of Llama and its kin has a gate
    _row("hidden_activation", "model.act", "", {"gelu_pytorch_tanh": "geglu_tanh"}),  # of Gemma
    _row("activation_function activation", "model.act", "",
         {each: each for each in ("gelu", "relu", "silu", "swiglu", "geglu")} | {"gelu_new": "gelu_tanh"}),
    _row("qk_layernorm use_qk_norm", "model.qk_norm", "", YES),
    _row("attention_sinks learnable_sinks use_sinks", "model.sinks", "", YES),
    _row("scale_embeddings embedding_scaling scale_emb", "model.scale_embedding", "", YES),
    _row("rope_local_base_freq local_rope_theta", "model.rope_local_base"),
    _row("norm_after use_post_norm use_sandwich_norm", "model.norm_place", "before, after or both", {}),
    _row("normalization norm_type", "model.norm", "",
         {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm", "rmsnorm": "rmsnorm", "layernorm": "layernorm"}),
    _row("rms_norm_eps layernorm_epsilon layer_norm_eps norm_epsilon layer_norm_epsilon", "model.norm_eps"),
    _row("tie_word_embeddings tie_embeddings weight_tying", "model.tied", "", YES),
    _row("untie_embeddings_and_output_weights", "model.tied", "", {"true": "false", "false": "true"}),
    _row("disable_bias_linear add_bias_linear use_bias", "model.bias", "", {}),
    _row("attention_dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop dropout_rate", "model.dropout"),
    _row("model_name_or_path name_or_path model_id pretrained_model_name_or_path base_model model_name pretrained init_from "
         "load_checkpoint_path initial_load_path",
         "model.weights", "a folder of Hugging Face weights, with model.hf for its config.json; without it weights are random", {}),
    _row("adapter", "model.lora.rank", "such as 16; 0: no LoRA", {}),
    _row("lora_rank lora_r lora_dim lora.r", "model.lora.rank", "0: no LoRA"),
    _row("lora_dropout lora.lora_dropout", "model.lora.dropout", "of A's inputs"),
    _row("lora_alpha", "model.lora.alpha"),
    _row("adapter_name_or_path lora_path adapter_path lora_weights lora_checkpoint lora_adapter adapter_checkpoint", "model.lora.weights",
         "a folder with adapter_config.json and adapter_model.safetensors", {}),
    _row("lora_target_modules target_modules lora_target lora_layers", "model.lora.targets",
         "a list of query, key, value, out, gate, up, down, or of PEFT's names; null: all", {"all-linear": "null", "all": "null"}),
    _row("flavor model_type model_size model.name", "model", "an option: `distrain ls model` lists them", {}),
    # data
    _row("dataset dataset_name dataset_path data_path train_file train_data data_dir data_files datasets dataset_folder "
         "data_prefix",
         "data.path", "with data=text, data=tokens, data=pairs or data=preferences", {}),
    _row("tokenizer_path tokenizer_model tokenizer_name tokenizer_name_or_path tokenizer_file vocab_file tokenizer_type "
         "hf_assets_path tokenizer.type", "data.tokenizer", "bytes, or the path of a tokenizer.json", {}),
    _row("val_set_size validation_split valid_split val_split", "data.validation", "share of the tokens"),
    _row("split", "data.validation", "share of the tokens", {}),
    _row("reset_attention_mask", "data.documents", "", YES),
    _row("validation_file validation_files eval_file eval_files valid_data_path val_data_path eval_data_path valid_files eval_dataset",
         "data.validate", "a set by a name of yours: {NAME: PATH}", {}),
    _row("text_column text_field content_key dataset_text_field", "data.text_key"),
    _row("document_length document_lengths doc_len doc_lens avg_doc_len mean_doc_len average_document_length", "data.document_tokens"),
    _row("field_messages messages_field conversation_column messages_column", "data.messages_key", "with data=pairs"),
    _row("train_on_last_turn masking_strategy", "data.turns", "all or last: assistant turns of data=pairs",
         {"true": "last", "false": "all", "train_on_assistant": "all", "train_on_last": "last"}),
    _row("train_on_eos", "", "the token that ends a turn is a label where the turn is"),
    _row("assistant_only_loss completion_only_loss train_on_inputs train_on_input train_on_prompt roles_to_train", "",
         "data=pairs trains on completions and assistant turns alone"),
    _row("chat_template custom_chat_template", "", "it is that of data.tokenizer's folder: chat_template.jinja or tokenizer_config.json"),
    _row("num_workers dataloader_num_workers", "", "data is read ahead; there is no number of workers"),
    _row("data_seed shuffle_seed", "train.seed", "it also sets the order of the data"),
    # log, checkpoints, validation
    _row("evals_per_epoch", "train.evaluate.every", "steps", {}),
    _row("enable_checkpoint", "checkpoint", "an option: `distrain ls checkpoint` lists them", {"true": "default", "false": "never"}),
    _row("save_strategy saves_per_epoch", "checkpoint.every", "steps; checkpoint=never saves nothing", {}),
    _row("eval_strategy evaluation_strategy", "train.evaluate.every", "steps; 0: never", {"no": "0"}),
    _row("push_to_hub hub_model_id hub_token", "", "`distrain export` writes a folder of Hugging Face, which you upload"),
    _row("do_train do_eval do_predict", "", "`distrain fit` trains, and train.evaluate.every sets how often it validates"),
    _row("ddp_backend distributed_backend", "", "NCCL between GPUs, gloo between CPUs"),
    _row("local_rank", "", "distrain sets it for each process"),
    _row("output_dir out_dir save_dir dump_folder default_root_dir logging_dir run_dir checkpoints_path", "log.dir",
         "the run folder is log.dir/name"),
    _row("run_name experiment_name exp_name job_name", "name"),
    _row("logging_steps log_interval log_freq log_every_n_steps steps_per_print", "log.every", "steps"),
    _row("save", "log.dir", "the run folder is log.dir/name; checkpoint.every says when it saves"),
    _row("load", "", "a run goes on from its own folder: the same command resumes it"),
    _row("report_to", "log.sinks", "a list",
         {**dict.fromkeys(("wandb", "[wandb]"), "[console,jsonl,wandb]"),
          **dict.fromkeys(("tensorboard", "[tensorboard]"), "[console,jsonl,tensorboard]")}),
    _row("wandb wandb.enabled wandb_project use_wandb enable_wandb create_wandb_logger wandb_log wandb_entity", "log",
         "log=wandb turns it on; WANDB_PROJECT names the project",
         {"true": "wandb"}),
    _row("tensorboard tensorboard.enabled tensorboard_dir enable_tensorboard", "log.sinks", "a list",
         {"true": "[console,jsonl,tensorboard]"}),
    _row("save_steps save_interval save_freq checkpoint_interval checkpoint.interval ckpt_interval checkpoint_every save_every_n_steps "
         "checkpoint_factor",
         "checkpoint.every", "steps"),
    _row("save_final_state save_last save_on_train_end save_final_checkpoint", "checkpoint.final"),
    _row("async_save async_mode async_checkpoint save_async ckpt_async enable_async_checkpointing", "checkpoint.background", "",
         {**YES, "async": "true", "async_with_pinned_mem": "true", "disabled": "false"}),
    _row("save_total_limit keep_latest_k keep_last_n", "checkpoint.keep"),
    _row("resume_from_checkpoint load_checkpoint auto_resume", "checkpoint.resume", "auto, must or never",
         {"true": "must", "false": "never"}),
    _row("log_straggler straggler_detection enable_straggler_detection rerun_mode check_weight_hash_across_dp_replicas_interval",
         "launch.device_check", "start, or steps between two checks of all devices", {}),
    _row("eval_steps eval_interval eval_freq val_check_interval evaluation_interval eval_every validation_freq validation.freq",
         "train.evaluate.every", "steps"),
    _row("validation.steps", "train.evaluate.batches", "global batches", {}),
    _row("eval_iters limit_val_batches eval_batches max_eval_batches", "train.evaluate.batches"),
    _row("conf_name config config_name recipe config_file", "conf", "the recipe", None),
)
# fmt: on
