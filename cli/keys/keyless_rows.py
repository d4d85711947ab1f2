"""What other trainers have a key for and distrain has none: what is so here in its place, and their names for it."""

from __future__ import annotations

from collections.abc import Mapping

# fmt: off
KEYLESS_ROWS: Mapping[str, str] = {
    # batch and length
    "train.batch = dp x train.microbatch x accumulation steps":
        "gradient_accumulation_steps accumulate_grad_batches grad_accum grad_accum_steps gradient_accumulation "
        "batch_accumulation_per_replica",
    "validation uses train.microbatch and train.seq too":
        "per_device_eval_batch_size eval_batch_size device_eval_batch_size eval_accumulation_steps validation.local_batch_size "
        "validation.seq_len",
    "train.steps or train.tokens sets the length of a run": "num_train_epochs epochs num_epochs max_epochs",
    "always: text is cut into full sequences, whole examples are packed into one":
        "packing sample_packing eval_sample_packing pad_to_sequence_len group_by_length",
    "every batch is full": "dataloader_drop_last drop_last",
    "a run goes on to its length; Ctrl-C saves and stops it":
        "early_stopping early_stopping_patience early_stopping_threshold early_stop early_stopping.patience",
    "launch.patience is of hangs, in seconds; a run does not stop early: it goes on to its length": "patience",
    "a run goes on to its length; SIGTERM saves, exits 75, and the same command goes on: #SBATCH --signal=B:TERM@120 sends it in time":
        "exit_duration_in_mins exit_interval exit_signal_handler",
    # optimizer
    "the schedule ends with the run; optim.schedule and optim.min_lr set its form":
        "lr_decay_iters lr_decay_samples decay_steps lr_decay_steps total_num_steps lr_decay_starting_step",
    "a warmup rises by equal steps, and its first step has optim.lr / optim.warmup": "lr_warmup_init warmup_min_lr lr_warmup_style",
    "wsd falls linearly, in the last fifth of the steps": "lr_wsd_decay_style",
    "optim.weight_decay is the same in all steps": "start_weight_decay end_weight_decay weight_decay_incr_style",
    "all weights have one rate; optim.mup scales it by their width": "decoupled_lr decoupled_min_lr",
    "weights that are stepped are fp32; train.precision is what layers compute in":
        "training.dtype main_params_dtype downcast_bf16 fp16_opt_level",
    "fp16 scales its loss by itself": "loss_scale initial_loss_scale initial_scale_power min_loss_scale loss_scale_window hysteresis",
    "the optimizer's kernel is chosen by the device": "optimizer.implementation torch_adam_is_fused early_step_in_backward",
    # kernels and memory
    "train.precision=fp8 scales each tensor by its own largest element of the moment; weights stay bf16":
        "fp8_recipe fp8_amax_history_len fp8_amax_compute_algo fp8_param_gather fp8_margin fp8_interval "
        "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp",
    "layers are distrain's own, with torch's kernels; train.compile=true fuses them":
        "use_mcore_models use_legacy_models transformer_impl no_gradient_accumulation_fusion no_masked_softmax_fusion "
        "no_bias_gelu_fusion no_bias_swiglu_fusion no_bias_dropout_fusion no_rope_fusion no_persist_layer_norm "
        "cross_entropy_loss_fusion cross_entropy_fusion_impl moe_permute_fusion moe_router_fusion compile.backend compile.components",
    "always: on a GPU the products of all experts are one kernel": "moe_grouped_gemm moe_use_legacy_grouped_gemm",
    "there are no CUDA graphs; train.compile=true launches fewer kernels":
        "enable_cuda_graph external_cuda_graph cuda_graph_scope cuda_graph_impl",
    "parallel.recompute=full recomputes every layer, each by itself": "recompute_method recompute_num_layers moe_layer_recompute",
    "parallel.sequence=true splits what is saved over tensor ranks": "distribute_saved_activations",
    "all of the optimizer's state is offloaded":
        "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d",
    "activations are not offloaded; parallel.recompute saves their memory":
        "cpu_offloading cpu_offloading_num_layers fine_grained_activation_offloading",
    "Python's garbage collector runs as it is":
        "manual_gc manual_gc_interval gc_freq gc_debug gen1_gc_interval empty_unused_memory_level",
    # layout
    "it follows from parallel.dp / parallel.shard": "data_parallel_replicate_degree",
    "it is cluster.nodes x cluster.gpus, as cluster=NODESxGPUS": "world_size num_processes",
    "distrain writes it: `distrain show --engine` prints it, and parallel.zero sets its stage": "deepspeed deepspeed_config",
    "each layer is a unit of parallel.zero=3":
        "fsdp_auto_wrap_policy auto_wrap_policy fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap wrapping_strategy",
    "parallel.overlap.data=true gathers the next layer's weights while one computes":
        "fsdp_backward_prefetch backward_prefetch fsdp_forward_prefetch forward_prefetch limit_all_gathers fsdp_double_buffer",
    "each rank reads or draws its own slices of the weights":
        "fsdp_cpu_ram_efficient_loading cpu_ram_efficient_loading fsdp_sync_module_states sync_module_states use_cpu_initialization "
        "no_initialization init_device",
    "parallel.zero=3 has one form": "fsdp_version fsdp_use_orig_params use_orig_params",
    "experts are split over parallel.ep, and each over parallel.tp":
        "expert_tensor_parallel_size expert_tensor_parallel_degree moe_extended_tp",
    "expert ranks exchange tokens by an all-to-all": "moe_token_dispatcher_type moe_enable_deepep moe_shared_expert_overlap",
    "ranks lie with parallel.pp outermost, then dp, cp and tp": "use_tp_pp_dp_mapping",
    "routers compute in fp32": "moe_router_dtype",
    "tensor ranks wait for their messages": "tp_comm_overlap enable_async_tensor_parallel tp_linear_async_communication",
    # model
    "they are counted from model.layers, .hidden, .ffn, .experts, .expert_ffn and .top_k; `distrain plan` prints how many there are":
        "model.parameters model.params model.num_parameters model.n_params model.size model.active_parameters model.active_params "
        "num_parameters n_params total_params active_params active_parameters",
    "model.kv_heads below model.heads": "group_query_attention",
    "rope turns elements i and i + D / 2 of a head, and 2i and 2i + 1 in family mla": "rotary_interleaved",
    "train.attention=flash keeps scores and their sums in fp32": "attention_softmax_in_fp32",
    "scores are divided once, by the root of model.head_dim": "apply_query_key_layer_scaling",
    "weights are drawn from a normal distribution: model.init.std": "init_method_xavier_uniform",
    "model.lora is plain LoRA, with its alpha / rank": "peft_use_dora use_dora use_rslora",
    "every layer has the positions of model.positions": "no_rope_layers no_rope_layer_interval nope_layer_interval no_rope_freq",
    "scores and logits are not capped":
        "attn_logit_softcapping final_logit_softcapping logit_softcapping attn_logit_softcap final_logit_softcap logits_soft_cap",
    "the feed-forward half reads the sum of attention and its input":
        "parallel_residual use_parallel_residual gpt_j_residual parallel_attn parallel_attn_output",
    "logits and residuals have no factor; model.scale_embedding and model.query_pre_attn_scalar scale embeddings and scores":
        "embedding_multiplier logits_scaling logit_scale residual_multiplier attention_multiplier",
    "the loss is the next token's cross entropy; train.z_loss adds to it, train.preference is of pairs; another is code: docs/extending.md":
        "loss_fn loss_function criterion",
    "no module of yours is imported; docs/extending.md says which files a new part takes":
        "custom_import custom_imports custom_config_module custom_args_module user_dir trust_remote_code",
    # data
    "the token that ends a turn is a label where the turn is": "train_on_eos",
    "data=pairs trains on completions and assistant turns alone":
        "assistant_only_loss completion_only_loss train_on_inputs train_on_input train_on_prompt roles_to_train",
    "it is that of data.tokenizer's folder: chat_template.jinja or tokenizer_config.json": "chat_template custom_chat_template",
    "data.tokenizer names one tokenizer.json, which holds its vocabulary and merges":
        "merge_file merges_file tokenizer_revision legacy_tokenizer vocab_extra_ids",
    "data is read ahead; there is no number of workers":
        "num_workers dataloader_num_workers num_loading_workers dataloader_pin_memory dataloader_prefetch_factor "
        "dataloader_persistent_workers data.pin_memory data.prefetch_factor data.persistent_workers",
    "files of tokens are memory-mapped, and train.seed orders their samples": "dataloader_type no_mmap_bin_files",
    "attention is causal in its kernel, without a mask": "create_attention_mask_in_dataloader no_create_attention_mask_in_dataloader",
    # log, checkpoints, machines
    "`distrain export` writes a folder of Hugging Face, which you upload": "push_to_hub hub_model_id hub_token",
    "`distrain export` writes one of a checkpoint, in --dtype":
        "last_save_in_hf last_save_model_only export_dtype save_safetensors",
    "`distrain fit` trains, and train.evaluate.every sets how often it validates": "do_train do_eval do_predict",
    "NCCL between GPUs, gloo between CPUs": "ddp_backend distributed_backend",
    "a hang is found by how long steps, saves and starts took before; launch.patience is the least time":
        "distributed_timeout_minutes ddp_timeout init_timeout_seconds train_timeout_seconds",
    "distrain sets it for each process": "local_rank machine_rank node_rank",
    "model.weights begins with weights alone, from a Hugging Face folder":
        "finetune no_load_optim no_load_rng initial_load_in_hf initial_load_model_only",
    "always: checkpoints hold weights, optimizer, data and step": "no_save_optim no_save_rng save_only_model",
    "checkpoints have one format, slices in safetensors, which every layout reads":
        "ckpt_format dist_ckpt_format use_dist_ckpt auto_detect_ckpt_format ckpt_fully_parallel_save ckpt_fully_parallel_load "
        "ckpt_assume_constant_structure fsdp_state_dict_type sharded_checkpointer",
    "a run resumes from its newest whole checkpoint": "ckpt_step load_step",
    "a resume takes the recipe's keys and names what changed":
        "use_checkpoint_args use_checkpoint_opt_param_scheduler override_opt_param_scheduler",
    "always: a step's loss is the mean over all its labels": "calculate_per_token_loss average_tokens_across_devices",
    "always: rows have tokens/s, MFU and the gradients' norm, and `distrain report` has memory":
        "log_throughput log_memory_to_tensorboard include_tokens_per_second include_num_input_tokens_seen skip_memory_metrics",
    "log.sinks=[console,jsonl,tensorboard] draws every figure of a row":
        "log_batch_size_to_tensorboard log_learning_rate_to_tensorboard log_world_size_to_tensorboard log_loss_scale_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_timers_to_tensorboard tensorboard_queue_size",
    "a run goes on from its own folder: the same command resumes it": "load resume_checkpoint_path ignore_data_skip",
    "checkpoint.keep=N keeps the newest N, not the best; evaluate, generate and export take --step N":
        "keep_best save_best save_best_only checkpoint.best best_checkpoint load_best_model_at_end metric_for_best_model greater_is_better "
        "save_top_k",
    "each run folder has metrics.jsonl, a row for each logged step": "log.csv csv_logger csv_log",
    "rows have the norm of all gradients together, not of each layer":
        "log_grad_norm grad_norm log_gradient_norm log_layer_grad_norms log_params_norm",
    "log=wandb turns it on; the variables WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP and WANDB_TAGS are wandb's own":
        "wandb_project wandb.project log.project log.wandb_project wandb_entity wandb.entity log.entity wandb_group wandb.group log.group "
        "wandb_tags wandb.tags log.tags",
    "logs are in the run folder, log.dir/name": "logging_dir wandb_save_dir save_tb_folder",
}
# fmt: on
