//! Declares the part of dlm_runtime.h that the wrapper calls. This file is written by hand. Later
//! versions of the library may add fields at the end of structs that start with `struct_size`. The
//! library reads `struct_size` in each struct that the wrapper passes. The structs that the library
//! returns begin with the fields that are declared here.

#![allow(non_camel_case_types)]

use std::os::raw::{c_char, c_void};

pub type dlm_status = i32;
pub const DLM_OK: dlm_status = 0;
pub const DLM_INVALID_ARGUMENT: dlm_status = 1;
pub const DLM_OUT_OF_MEMORY: dlm_status = 6;

/// The types of handles. Programs use only pointers to these types.
pub enum dlm_bundle {}
pub enum dlm_session {}
pub enum dlm_automaton {}
pub enum dlm_scheduler {}
pub enum dlm_job {}

pub type dlm_step_fn = extern "C" fn(user: *mut c_void, step: *const dlm_step) -> i32;

#[repr(C)]
#[derive(Debug, Clone)]
pub struct dlm_policy {
    pub struct_size: usize,
    pub select: *const c_char,
    pub score: *const c_char,
    pub commit: *const c_char,
    pub compare: *const c_char,
    pub remask: *const c_char,
    pub cache: *const c_char,
    pub stop: *const c_char,
    pub block_length: i32,
    pub steps_per_block: i32,
    pub refresh: i32,
    pub threshold: f64,
    pub factor: f64,
    pub entropy_bound: f64,
    pub timestep_eps: f64,
    pub temperature: f64,
    pub seed: u64,
    pub store: *const c_char,
    pub sub_block_length: i32,
    pub edit_passes: i32,
    pub edit_threshold: f64,
    pub top_p: f64,
    pub top_k: i32,
    pub score_of: *const c_char,
    pub cfg_scale: f64,
    pub schedule: *const c_char,
    pub reserve: *const c_char,
    pub reuse_prompt: i32,
    pub next_block: f64,
    pub temperature_drop: f64,
    pub stable_entropy: f64,
    pub stable_passes: i32,
    pub cache_delay: i32,
    pub refresh_interval: i32,
    pub finish_threshold: f64,
    pub force_next: f64,
}

#[repr(C)]
pub struct dlm_bundle_info {
    pub struct_size: usize,
    pub denoiser: *const dlm_denoiser,
    pub manifest: *const c_char,
    pub engine: *const c_char,
}

pub const DLM_CONSTRAINT_REGEX: i32 = 0;
pub const DLM_CONSTRAINT_SCHEMA: i32 = 1;
pub const DLM_CONSTRAINT_ENUM: i32 = 2;
pub const DLM_CONSTRAINT_JSON_OBJECT: i32 = 3;
pub const DLM_CONSTRAINT_TREE: i32 = 4;
pub const DLM_CONSTRAINT_GRAMMAR: i32 = 5;
pub const DLM_CONSTRAINT_COMPILED: i32 = 6;
pub const DLM_CONSTRAINT_FILE: i32 = 7;
pub const DLM_CONSTRAINT_DECISIONS: i32 = 8;

#[repr(C)]
pub struct dlm_constraint {
    pub struct_size: usize,
    pub kind: i32,
    pub content: *const c_char,
    pub content_size: usize,
}

pub const DLM_FIELD_CHOICE: i32 = 0;
pub const DLM_FIELD_INT32: i32 = 1;
pub const DLM_FIELD_DOUBLE: i32 = 2;

#[repr(C)]
pub struct dlm_policy_field {
    pub struct_size: usize,
    pub name: *const c_char,
    pub kind: i32,
    pub offset: usize,
    pub choices: *const *const c_char,
    pub initial: f64,
    pub lowest: f64,
    pub highest: f64,
}

pub const DLM_TEXT_RESULT: i32 = 1;
pub const DLM_TEXT_STEPS: i32 = 2;

#[repr(C)]
pub struct dlm_step {
    pub struct_size: usize,
    pub canvas: *const i32,
    pub guess: *const i32,
    pub score: *const f32,
    pub undecided: *const u8,
    pub length: i32,
    pub block_start: i32,
    pub block_end: i32,
    pub nfe: i32,
    pub committed: i32,
    pub done: i32,
    pub text: *const c_char,
    pub text_size: usize,
    pub prompt_tokens: i32,
}

#[repr(C)]
pub struct dlm_request {
    pub struct_size: usize,
    pub tokens: *const i32,
    pub token_count: usize,
    pub prompt: *const c_char,
    pub prompt_size: usize,
    pub messages: *const dlm_message,
    pub message_count: usize,
    pub special_tokens: i32,
    pub max_new_tokens: i32,
    pub policy: *const dlm_policy,
    pub steps: i32,
    pub constraint: *const dlm_automaton,
    pub constrained_tokens: i32,
    pub max_steps: i32,
    pub deadline_ms: f64,
    pub stop_strings: *const *const c_char,
    pub stop_count: usize,
    pub text: i32,
    pub text_start: i32,
    pub decode: *const c_void,
    pub on_step: Option<dlm_step_fn>,
    pub user: *mut c_void,
    pub top_log_probs: i32,
    pub prefix_group: i32,
    pub new_tokens: i64,
}

#[repr(C)]
pub struct dlm_open_options {
    pub struct_size: usize,
    pub engine: *const c_char,
    pub engine_library: *const c_char,
    pub threads: i32,
    pub check_hashes: i32,
    pub provider: *const c_char,
    pub device: i32,
    pub allow_fallback: i32,
}

#[repr(C)]
pub struct dlm_denoiser {
    pub struct_size: usize,
    pub vocab_size: i32,
    pub mask_token_id: i32,
    pub max_canvas_length: i32,
    pub layers: i32,
    pub kv_heads: i32,
    pub head_size: i32,
    pub top_k: i32,
    pub kv_element_bytes: i32,
    pub shift: i32,
    pub has_cache: i32,
    pub eos_token_ids: *const i32,
    pub eos_count: usize,
    pub visible_block: i64,
    pub max_new_tokens: i32,
}

#[repr(C)]
pub struct dlm_stats {
    pub struct_size: usize,
    pub nfe: i32,
}

#[repr(C)]
pub struct dlm_result {
    pub struct_size: usize,
    pub status: dlm_status,
    pub message: *const c_char,
    pub finish: i32,
    pub prompt_tokens: i32,
    pub completion_tokens: i32,
    pub tokens: *const i32,
    pub log_probs: *const f32,
    pub undecided: *const u8,
    pub length: usize,
    pub text: *const c_char,
    pub text_size: usize,
    pub is_text_decided: i32,
    pub constraint_log_prob_loss: f64,
    pub stats: *const dlm_stats,
    pub top_tokens: *const i32,
    pub top_log_probs: *const f32,
    pub top_count: usize,
    pub option_probs: *const f64,
    pub option_count: usize,
}

#[repr(C)]
pub struct dlm_message {
    pub role: *const c_char,
    pub content: *const c_char,
    pub content_size: usize,
}

extern "C" {
    pub fn dlm_status_name(status: dlm_status) -> *const c_char;
    pub fn dlm_open_options_init(options: *mut dlm_open_options, struct_size: usize);
    pub fn dlm_bundle_open(
        path: *const c_char,
        options: *const dlm_open_options,
        message: *mut c_char,
        message_capacity: usize,
        bundle: *mut *mut dlm_bundle,
    ) -> dlm_status;
    pub fn dlm_bundle_destroy(bundle: *mut dlm_bundle);
    pub fn dlm_bundle_describe(bundle: *const dlm_bundle) -> *const dlm_bundle_info;
    pub fn dlm_session_create(
        bundle: *mut dlm_bundle,
        message: *mut c_char,
        message_capacity: usize,
        session: *mut *mut dlm_session,
    ) -> dlm_status;
    pub fn dlm_session_destroy(session: *mut dlm_session);
    pub fn dlm_session_last_error(session: *const dlm_session) -> *const c_char;
    pub fn dlm_session_cancel(session: *mut dlm_session, request: usize);
    pub fn dlm_session_generate(
        session: *mut dlm_session,
        request: *const dlm_request,
        result: *mut *const dlm_result,
    ) -> dlm_status;
    pub fn dlm_request_init(request: *mut dlm_request, struct_size: usize);
    pub fn dlm_bundle_policy(
        bundle: *const dlm_bundle,
        preset: *const c_char,
        effort: *const c_char,
        message: *mut c_char,
        message_capacity: usize,
        policy: *mut dlm_policy,
    ) -> dlm_status;
    pub fn dlm_policy_init(policy: *mut dlm_policy, struct_size: usize);
    pub fn dlm_policy_field_at(index: usize) -> *const dlm_policy_field;
    pub fn dlm_constraint_init(constraint: *mut dlm_constraint, struct_size: usize);
    pub fn dlm_automaton_compile(
        bundle: *mut dlm_bundle,
        constraint: *const dlm_constraint,
        message: *mut c_char,
        message_capacity: usize,
        automaton: *mut *mut dlm_automaton,
    ) -> dlm_status;
    pub fn dlm_automaton_destroy(automaton: *mut dlm_automaton);
    pub fn dlm_scheduler_create(
        bundle: *mut dlm_bundle,
        options: *const c_void,
        message: *mut c_char,
        message_capacity: usize,
        scheduler: *mut *mut dlm_scheduler,
    ) -> dlm_status;
    pub fn dlm_scheduler_destroy(scheduler: *mut dlm_scheduler);
    pub fn dlm_scheduler_submit(
        scheduler: *mut dlm_scheduler,
        request: *const dlm_request,
        message: *mut c_char,
        message_capacity: usize,
        job: *mut *mut dlm_job,
    ) -> dlm_status;
    pub fn dlm_scheduler_run(
        scheduler: *mut dlm_scheduler,
        until_idle: i32,
        before_pass: Option<extern "C" fn(user: *mut c_void) -> i32>,
        user: *mut c_void,
        message: *mut c_char,
        message_capacity: usize,
    ) -> dlm_status;
    pub fn dlm_scheduler_stop(scheduler: *mut dlm_scheduler);
    pub fn dlm_job_wait(job: *const dlm_job, timeout_ms: f64) -> i32;
    pub fn dlm_job_result(job: *const dlm_job, result: *mut *const dlm_result) -> dlm_status;
    pub fn dlm_job_cancel(job: *mut dlm_job);
    pub fn dlm_job_destroy(job: *mut dlm_job);
}
