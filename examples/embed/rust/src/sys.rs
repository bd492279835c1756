//! The part of dlm_runtime.h that the wrapper calls, by hand. Structs with a `struct_size` may grow in C: the library is
//! told the size of these.

#![allow(non_camel_case_types)]

use std::os::raw::{c_char, c_void};

pub type dlm_status = i32;
pub const DLM_OK: dlm_status = 0;

/// Handles: only pointers to them exist here.
pub enum dlm_bundle {}
pub enum dlm_session {}

pub type dlm_text_fn = extern "C" fn(user: *mut c_void, delta: *const c_char, size: usize) -> i32;

#[repr(C)]
pub struct dlm_generate_options {
    pub struct_size: usize,
    pub policy: *const c_void,
    pub max_new_tokens: i32,
    pub steps: i32,
    pub on_step: *const c_void,
    pub user: *mut c_void,
    pub policies: *const *const c_void,
    pub deadline_ms: f64,
    pub max_steps: i32,
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
}
