//! A safe wrapper of libdlm_runtime: a [`Bundle`] is opened once, and each thread generates with a [`Session`] of its own.
//!
//! Bundles may be shared (`Send + Sync`, cheap to clone); a session may move to another thread, but is used by one at a time
//! (`Send`, not `Sync`); a [`Canceller`] ends a session's request from anywhere.

use std::any::Any;
use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::fmt;
use std::marker::PhantomData;
use std::mem::{size_of, MaybeUninit};
use std::ops::ControlFlow;
use std::os::raw::{c_char, c_void};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::ptr::{null, null_mut};
use std::sync::Arc;

mod sys;

/// Why a call failed: the status of `dlm_runtime.h`, and a sentence for people.
#[derive(Debug, Clone)]
pub struct Error {
    pub status: i32,
    pub sentence: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: static, never NULL.
        let name = unsafe { text_of(sys::dlm_status_name(self.status)) };
        write!(f, "{name}: {}", self.sentence)
    }
}

impl std::error::Error for Error {}

pub type Result<T> = std::result::Result<T, Error>;

/// SAFETY: `text` is NUL-terminated.
unsafe fn text_of(text: *const c_char) -> String {
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error { status: 1, sentence: format!("{text:?} holds a NUL") })
}

/// Calls a function of C with the buffer for its sentence.
fn check(call: impl FnOnce(*mut c_char, usize) -> sys::dlm_status) -> Result<()> {
    let mut message = [0 as c_char; 1024];
    match call(message.as_mut_ptr(), message.len()) {
        sys::DLM_OK => Ok(()),
        // SAFETY: the library ends it with a NUL.
        status => Err(Error { status, sentence: unsafe { text_of(message.as_ptr()) } }),
    }
}

struct RawBundle(*mut sys::dlm_bundle);

// SAFETY: dlm_runtime.h, threads: a bundle may be shared by any number of them.
unsafe impl Send for RawBundle {}
unsafe impl Sync for RawBundle {}

impl Drop for RawBundle {
    fn drop(&mut self) {
        // SAFETY: sessions hold an Arc of this, so none is left.
        unsafe { sys::dlm_bundle_destroy(self.0) }
    }
}

/// An opened bundle. Clones are the same one; it closes when they and all sessions are gone.
#[derive(Clone)]
pub struct Bundle(Arc<RawBundle>);

impl Bundle {
    /// Opens the folder, checks its hashes, and loads ONNX Runtime with `threads` threads (0: all cores).
    pub fn open(path: &str, threads: i32) -> Result<Self> {
        let path = c_string(path)?;
        let mut options = MaybeUninit::<sys::dlm_open_options>::uninit();
        let mut bundle = null_mut();
        // SAFETY: init fills the struct; the others are valid for the call.
        check(|message, capacity| unsafe {
            sys::dlm_open_options_init_sized(options.as_mut_ptr(), size_of::<sys::dlm_open_options>());
            let mut options = options.assume_init();
            options.threads = threads;
            sys::dlm_bundle_open(path.as_ptr(), &options, message, capacity, &mut bundle)
        })?;
        Ok(Self(Arc::new(RawBundle(bundle))))
    }

    /// What runs it, as a line for people.
    pub fn engine(&self) -> String {
        // SAFETY: the bundle's own, NUL-terminated.
        unsafe { text_of(sys::dlm_bundle_engine((self.0).0)) }
    }
}

/// Destroyed when the session and its cancellers are gone.
struct RawSession {
    raw: *mut sys::dlm_session,
    _bundle: Arc<RawBundle>, // outlives it
}

// SAFETY: shared references lead to dlm_session_cancel alone, which any thread may call; everything else takes `&mut Session`,
// and a session may move between threads.
unsafe impl Send for RawSession {}
unsafe impl Sync for RawSession {}

impl Drop for RawSession {
    fn drop(&mut self) {
        // SAFETY: nobody uses it any more.
        unsafe { sys::dlm_session_destroy(self.raw) }
    }
}

/// Ends the request that a session runs, within one pass, with what it has. From any thread.
#[derive(Clone)]
pub struct Canceller(Arc<RawSession>);

impl Canceller {
    pub fn cancel(&self) {
        // SAFETY: from any thread; the Arc keeps the session.
        unsafe { sys::dlm_session_cancel(self.0.raw, 0) }
    }
}

/// What a request may take. Policies are the bundle's default preset's.
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub max_new_tokens: i32,
    /// Milliseconds after which no pass starts; 0: any number.
    pub deadline_ms: f64,
    /// Passes at most; 0: any number.
    pub max_steps: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    Stop,
    Length,
    Steps,
    Deadline,
    Cancelled,
    Constraint,
}

#[derive(Debug, Clone)]
pub struct Generation {
    pub text: String,
    pub finish: Finish,
    pub passes: i32,
    pub prompt_tokens: i32,
    pub completion_tokens: i32,
}

/// Generates, on one thread at a time.
pub struct Session {
    raw: Arc<RawSession>,
    _not_sync: PhantomData<Cell<()>>,
}

/// What C hands back to us: the caller's function, and what it panicked with.
struct Listener<'a> {
    on_text: &'a mut dyn FnMut(&str) -> ControlFlow<()>,
    panicked: Option<Box<dyn Any + Send>>,
}

/// No panic may cross C: it is kept, and ends the request.
extern "C" fn on_text(user: *mut c_void, delta: *const c_char, size: usize) -> i32 {
    // SAFETY: `user` is the Listener of the call that runs, and delta has `size` bytes of UTF-8.
    let (listener, delta) =
        unsafe { (&mut *user.cast::<Listener<'_>>(), std::slice::from_raw_parts(delta.cast::<u8>(), size)) };
    let told = AssertUnwindSafe(|| (listener.on_text)(&String::from_utf8_lossy(delta)).is_break());
    catch_unwind(told).map_or_else(
        |panic| {
            listener.panicked = Some(panic);
            1
        },
        i32::from,
    )
}

impl Session {
    pub fn new(bundle: &Bundle) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: valid for the call.
        check(|message, capacity| unsafe { sys::dlm_session_create((bundle.0).0, message, capacity, &mut raw) })?;
        Ok(Self { raw: Arc::new(RawSession { raw, _bundle: bundle.0.clone() }), _not_sync: PhantomData })
    }

    pub fn canceller(&self) -> Canceller {
        Canceller(self.raw.clone())
    }

    /// What follows a prompt. `on_text` is told what each step adds, whole characters; `Break` ends the request with an error.
    pub fn generate_text(
        &mut self,
        prompt: &str,
        options: &Options,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        self.generate(options, on_text, |session, options, function, user, text, size| {
            let start = prompt.as_ptr().cast();
            // SAFETY: all valid for the call.
            unsafe { sys::dlm_generate_text(session, options, start, prompt.len(), function, user, text, size) }
        })
    }

    /// The assistant's answer to messages, each of a role and a content.
    pub fn generate_chat(
        &mut self,
        chat: &[(&str, &str)],
        options: &Options,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let roles = chat.iter().map(|(role, _)| c_string(role)).collect::<Result<Vec<_>>>()?;
        let messages: Vec<_> = chat
            .iter()
            .zip(&roles)
            .map(|((_, content), role)| sys::dlm_message {
                role: role.as_ptr(),
                content: content.as_ptr().cast(),
                content_size: content.len(),
            })
            .collect();
        self.generate(options, on_text, |session, options, function, user, text, size| {
            let (start, count) = (messages.as_ptr(), messages.len());
            // SAFETY: all valid for the call.
            unsafe { sys::dlm_generate_chat(session, options, start, count, function, user, text, size) }
        })
    }

    fn generate(
        &mut self,
        options: &Options,
        mut function: impl FnMut(&str) -> ControlFlow<()>,
        call: impl FnOnce(
            *mut sys::dlm_session,
            *const sys::dlm_generate_options,
            Option<sys::dlm_text_fn>,
            *mut c_void,
            *mut *const c_char,
            *mut usize,
        ) -> sys::dlm_status,
    ) -> Result<Generation> {
        let mut given = MaybeUninit::<sys::dlm_generate_options>::uninit();
        // SAFETY: init fills the struct.
        let mut given = unsafe {
            sys::dlm_generate_options_init_sized(given.as_mut_ptr(), size_of::<sys::dlm_generate_options>());
            given.assume_init()
        };
        given.max_new_tokens = options.max_new_tokens;
        given.deadline_ms = options.deadline_ms;
        given.max_steps = options.max_steps;
        let mut listener = Listener { on_text: &mut function, panicked: None };
        let (mut text, mut size) = (null(), 0);
        let user: *mut c_void = std::ptr::addr_of_mut!(listener).cast();
        let status = call(self.raw.raw, &given, Some(on_text), user, &mut text, &mut size);
        if let Some(panic) = listener.panicked {
            resume_unwind(panic);
        }
        self.done(status)?;
        // SAFETY: on success text has `size` bytes, the session's until its next call.
        let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), size) };
        let text = String::from_utf8_lossy(text).into_owned();
        let mut result = MaybeUninit::<sys::dlm_result>::zeroed();
        // SAFETY: all zeros are a valid struct; no pointer of it is read.
        let (status, result) = unsafe {
            let size = size_of::<sys::dlm_result>();
            (sys::dlm_session_result_sized(self.raw.raw, 0, result.as_mut_ptr(), size), result.assume_init())
        };
        self.done(status)?;
        Ok(Generation {
            text,
            finish: match result.finish {
                1 => Finish::Stop,
                2 => Finish::Length,
                3 => Finish::Steps,
                4 => Finish::Deadline,
                6 => Finish::Constraint,
                _ => Finish::Cancelled,
            },
            passes: result.nfe,
            prompt_tokens: result.prompt_tokens,
            completion_tokens: result.completion_tokens,
        })
    }

    fn done(&self, status: sys::dlm_status) -> Result<()> {
        if status == sys::DLM_OK {
            return Ok(());
        }
        // SAFETY: NUL-terminated, the session's.
        Err(Error { status, sentence: unsafe { text_of(sys::dlm_session_last_error(self.raw.raw)) } })
    }
}

/// The compiler keeps to what the library says of threads.
#[allow(dead_code)]
fn threads_are_as_the_header_says() {
    fn shared<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    shared::<Bundle>();
    shared::<Canceller>();
    moved::<Session>();
}
