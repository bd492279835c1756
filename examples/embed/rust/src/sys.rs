//! The part of dlm_runtime.h that the wrapper calls, written by hand. Structs with a `struct_size` may grow in C. The library
//! accepts these shorter ones, because it reads their size.

#![allow(non_camel_case_types)]

use std::os::raw::{c_char, c_void};

pub type dlm_status = i32;
pub const DLM_OK: dlm_status = 0;
pub const DLM_INVALID_ARGUMENT: dlm_status = 1;
pub const DLM_OUT_OF_MEMORY: dlm_status = 6;

/// Handles, which exist only as pointers.
pub enum dlm_bundle {}
pub enum dlm_session {}
pub enum dlm_automaton {}
pub enum dlm_text {}
pub enum dlm_scheduler {}
pub enum dlm_job {}

pub type dlm_text_fn = extern "C" fn(user: *mut c_void, delta: *const c_char, size: usize) -> i32;

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
}

pub const DLM_ENCODE_PROMPT: i32 = 1;
pub const DLM_ENCODE_SPECIAL: i32 = 2;
pub const DLM_FIELD_CHOICE: i32 = 0;
pub const DLM_FIELD_INT32: i32 = 1;
pub const DLM_FIELD_DOUBLE: i32 = 2;

#[repr(C)]
pub struct dlm_policy_field {
    pub name: *const c_char,
    pub kind: i32,
    pub offset: usize,
    pub choices: *const *const c_char,
    pub initial: f64,
    pub lowest: f64,
    pub highest: f64,
}

#[repr(C)]
pub struct dlm_generate_options {
    pub struct_size: usize,
    pub policy: *const dlm_policy,
    pub max_new_tokens: i32,
    pub steps: i32,
    pub on_step: *const c_void,
    pub user: *mut c_void,
    pub policies: *const *const dlm_policy,
    pub deadline_ms: f64,
    pub max_steps: i32,
    pub special_tokens: i32,
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
pub struct dlm_result {
    pub struct_size: usize,
    pub finish: i32,
    pub nfe: i32,
    pub prompt_tokens: i32,
    pub completion_tokens: i32,
    pub log_probs: *const f32,
    pub undecided: *const u8,
    pub length: usize,
}

#[repr(C)]
pub struct dlm_message {
    pub role: *const c_char,
    pub content: *const c_char,
    pub content_size: usize,
}

extern "C" {
    pub fn dlm_status_name(status: dlm_status) -> *const c_char;
    pub fn dlm_open_options_init_sized(options: *mut dlm_open_options, struct_size: usize);
    pub fn dlm_bundle_open(
        path: *const c_char,
        options: *const dlm_open_options,
        message: *mut c_char,
        message_capacity: usize,
        bundle: *mut *mut dlm_bundle,
    ) -> dlm_status;
    pub fn dlm_bundle_destroy(bundle: *mut dlm_bundle);
    pub fn dlm_bundle_engine(bundle: *const dlm_bundle) -> *const c_char;
    pub fn dlm_session_create(
        bundle: *mut dlm_bundle,
        message: *mut c_char,
        message_capacity: usize,
        session: *mut *mut dlm_session,
    ) -> dlm_status;
    pub fn dlm_session_destroy(session: *mut dlm_session);
    pub fn dlm_session_last_error(session: *const dlm_session) -> *const c_char;
    pub fn dlm_session_cancel(session: *mut dlm_session, request: usize);
    pub fn dlm_session_result_sized(
        session: *mut dlm_session,
        request: usize,
        result: *mut dlm_result,
        struct_size: usize,
    ) -> dlm_status;
    pub fn dlm_generate_options_init_sized(options: *mut dlm_generate_options, struct_size: usize);
    pub fn dlm_generate_text(
        session: *mut dlm_session,
        options: *const dlm_generate_options,
        prompt: *const c_char,
        prompt_size: usize,
        on_text: Option<dlm_text_fn>,
        user: *mut c_void,
        text: *mut *const c_char,
        size: *mut usize,
    ) -> dlm_status;
    pub fn dlm_generate_chat(
        session: *mut dlm_session,
        options: *const dlm_generate_options,
        messages: *const dlm_message,
        message_count: usize,
        on_text: Option<dlm_text_fn>,
        user: *mut c_void,
        text: *mut *const c_char,
        size: *mut usize,
    ) -> dlm_status;
    pub fn dlm_bundle_max_new_tokens(bundle: *const dlm_bundle) -> i32;
    pub fn dlm_bundle_preset(
        bundle: *const dlm_bundle,
        name: *const c_char,
        message: *mut c_char,
        message_capacity: usize,
        policy: *mut dlm_policy,
    ) -> dlm_status;
    pub fn dlm_bundle_effort(
        bundle: *const dlm_bundle,
        level: *const c_char,
        message: *mut c_char,
        message_capacity: usize,
        policy: *mut dlm_policy,
    ) -> dlm_status;
    pub fn dlm_policy_init_sized(policy: *mut dlm_policy, struct_size: usize);
    pub fn dlm_policy_field_at(index: usize) -> *const dlm_policy_field;
    pub fn dlm_automaton_open(
        path: *const c_char,
        message: *mut c_char,
        message_capacity: usize,
        automaton: *mut *mut dlm_automaton,
    ) -> dlm_status;
    pub fn dlm_automaton_read(
        data: *const c_void,
        size: usize,
        message: *mut c_char,
        message_capacity: usize,
        automaton: *mut *mut dlm_automaton,
    ) -> dlm_status;
    pub fn dlm_automaton_destroy(automaton: *mut dlm_automaton);
    pub fn dlm_session_constrain(session: *mut dlm_session, automaton: *const dlm_automaton) -> dlm_status;
    pub fn dlm_bundle_text(
        bundle: *mut dlm_bundle,
        message: *mut c_char,
        message_capacity: usize,
        text: *mut *const dlm_text,
    ) -> dlm_status;
    pub fn dlm_text_encode(
        text: *const dlm_text,
        string: *const c_char,
        size: usize,
        flags: i32,
        message: *mut c_char,
        message_capacity: usize,
        tokens: *mut i32,
        capacity: usize,
        count: *mut usize,
    ) -> dlm_status;
    pub fn dlm_text_decode(
        text: *const dlm_text,
        tokens: *const i32,
        count: usize,
        message: *mut c_char,
        message_capacity: usize,
        string: *mut c_char,
        capacity: usize,
        size: *mut usize,
    ) -> dlm_status;
    pub fn dlm_chat_encode(
        text: *const dlm_text,
        messages: *const dlm_message,
        message_count: usize,
        flags: i32,
        message: *mut c_char,
        message_capacity: usize,
        tokens: *mut i32,
        capacity: usize,
        count: *mut usize,
    ) -> dlm_status;
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
        options: *const dlm_generate_options,
        automaton: *const dlm_automaton,
        given: i32,
        tokens: *const i32,
        count: usize,
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
    pub fn dlm_job_tokens(job: *const dlm_job, length: *mut usize) -> *const i32;
    pub fn dlm_job_result_sized(job: *const dlm_job, result: *mut dlm_result, struct_size: usize) -> dlm_status;
    pub fn dlm_job_message(job: *const dlm_job) -> *const c_char;
    pub fn dlm_job_cancel(job: *mut dlm_job);
    pub fn dlm_job_destroy(job: *mut dlm_job);
}
