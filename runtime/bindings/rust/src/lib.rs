//! A safe wrapper of libdlm_runtime, which generates text from bundles of dlm-export.
//!
//! Open a [`Bundle`] once and share it between threads. Each thread generates with a [`Session`] of
//! its own. With a [`Canceller`], any thread can end a session's request. To run many requests at
//! the same time, submit them to a [`Scheduler`], which runs them in shared passes. [`Options`]
//! sets the length, the [`Policy`] and the constraint ([`Automaton`]) of a request.
//!
//! ```no_run
//! use dlm_runtime::{Bundle, Options, Session};
//! use std::ops::ControlFlow;
//!
//! let bundle = Bundle::open("build/demo", 0)?;
//! let options = Options { policy: Some(bundle.preset("fast-dllm")?), ..Options::default() };
//! let mut session = Session::new(&bundle)?;
//! let out = session.generate_text("play jazz", &options, |_| ControlFlow::Continue(()))?;
//! println!("{}", out.text);
//! # Ok::<(), dlm_runtime::Error>(())
//! ```

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

mod automaton;
mod policy;
mod scheduler;
mod sys;

pub use automaton::{Automaton, Content};
pub use policy::Policy;
pub use scheduler::{Job, Scheduler};

/// Why a call failed.
#[derive(Debug, Clone)]
pub struct Error {
    /// The `dlm_status` of `dlm_runtime.h`, such as 2 for `DLM_NOT_FOUND`.
    pub status: i32,
    /// The error message.
    pub sentence: String,
}

impl Error {
    fn invalid(sentence: String) -> Self {
        Self { status: sys::DLM_INVALID_ARGUMENT, sentence }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: the returned string is static, and never NULL.
        let name = unsafe { text_of(sys::dlm_status_name(self.status)) };
        write!(f, "{name}: {}", self.sentence)
    }
}

impl std::error::Error for Error {}

/// A `Result` whose error type is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// SAFETY: `text` must end with a NUL.
unsafe fn text_of(text: *const c_char) -> String {
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid(format!("{text:?} holds a NUL")))
}

/// Calls a C function that writes an error message to a buffer.
fn check(call: impl FnOnce(*mut c_char, usize) -> sys::dlm_status) -> Result<()> {
    let mut message = [0 as c_char; 1024];
    match call(message.as_mut_ptr(), message.len()) {
        sys::DLM_OK => Ok(()),
        // SAFETY: the library ends the message with a NUL.
        status => Err(Error { status, sentence: unsafe { text_of(message.as_ptr()) } }),
    }
}

#[derive(Debug)]
struct RawBundle(*mut sys::dlm_bundle);

// SAFETY: by dlm_runtime.h, any number of threads may share a bundle.
unsafe impl Send for RawBundle {}
unsafe impl Sync for RawBundle {}

impl Drop for RawBundle {
    fn drop(&mut self) {
        // SAFETY: each session holds an Arc of this bundle, so all sessions were dropped.
        unsafe { sys::dlm_bundle_destroy(self.0) }
    }
}

/// An open bundle. A clone refers to the same bundle. The bundle is closed when all its clones,
/// sessions, schedulers and policies have been dropped.
#[derive(Debug, Clone)]
pub struct Bundle(Arc<RawBundle>);

impl Bundle {
    /// Opens the bundle in a folder, checks the hashes of the bundle's files, and loads ONNX
    /// Runtime. `threads` is the number of threads that ONNX Runtime uses. 0 means one thread per
    /// core.
    pub fn open(path: &str, threads: i32) -> Result<Self> {
        let path = c_string(path)?;
        let mut options = MaybeUninit::<sys::dlm_open_options>::uninit();
        let mut bundle = null_mut();
        // SAFETY: init fills the struct; all pointers are valid for the call.
        check(|message, capacity| unsafe {
            sys::dlm_open_options_init(options.as_mut_ptr(), size_of::<sys::dlm_open_options>());
            let mut options = options.assume_init();
            options.threads = threads;
            sys::dlm_bundle_open(path.as_ptr(), &options, message, capacity, &mut bundle)
        })?;
        Ok(Self(Arc::new(RawBundle(bundle))))
    }

    /// Returns the largest number of new tokens of a request that does not set `max_new_tokens`.
    pub fn max_new_tokens(&self) -> u32 {
        // SAFETY: the handle is open.
        unsafe { (*(*sys::dlm_bundle_describe((self.0).0)).denoiser).max_new_tokens }.unsigned_abs()
    }

    /// Returns the bundle's preset with this name, for example `"fast-dllm"`. If the name is
    /// unknown, the error lists all names.
    pub fn preset(&self, name: &str) -> Result<Policy> {
        Policy::of_bundle(self, Some(name), None)
    }

    /// Returns the policy of an effort level: `"instant"`, `"low"`, `"medium"` or `"high"`. Fails
    /// if the bundle contains no effort levels. `dlm-export effort` adds effort levels to a bundle.
    pub fn effort(&self, level: &str) -> Result<Policy> {
        Policy::of_bundle(self, None, Some(level))
    }

    /// Returns one line of text that describes the bundle's engine.
    pub fn engine(&self) -> String {
        // SAFETY: the bundle owns this string, which ends with a NUL.
        unsafe { text_of((*sys::dlm_bundle_describe((self.0).0)).engine) }
    }
}

/// A session's handle. It is destroyed when the session and all its cancellers have been dropped.
struct RawSession {
    raw: *mut sys::dlm_session,
    _bundle: Arc<RawBundle>, // the bundle outlives `raw`
}

// SAFETY: with a shared reference, only dlm_session_cancel can be called, and any thread may call
// it. All other calls take `&mut Session`, and a session may move between threads.
unsafe impl Send for RawSession {}
unsafe impl Sync for RawSession {}

impl Drop for RawSession {
    fn drop(&mut self) {
        // SAFETY: no other object uses the handle any more.
        unsafe { sys::dlm_session_destroy(self.raw) }
    }
}

/// Ends a session's running request from any thread.
#[derive(Clone)]
pub struct Canceller(Arc<RawSession>);

impl Canceller {
    /// Ends the request after at most one more pass. The result contains the text so far and
    /// [`Finish::Cancelled`].
    pub fn cancel(&self) {
        // SAFETY: any thread may call this function, and the Arc keeps the session alive.
        unsafe { sys::dlm_session_cancel(self.0.raw, 0) }
    }
}

/// The options of a request. `Options::default()` selects the bundle's default length and default
/// preset.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The largest number of tokens to generate. `None` means [`Bundle::max_new_tokens`].
    pub max_new_tokens: Option<u32>,
    /// The exact number of mask tokens to add and fill, instead of `max_new_tokens`. 0 means that
    /// `max_new_tokens` applies.
    pub new_tokens: u32,
    /// The policy. `None` means the bundle's default preset.
    pub policy: Option<Policy>,
    /// The constraint. `None` means that any text is allowed.
    pub constraint: Option<Automaton>,
    /// The stop strings. The text ends before the first stop string.
    pub stop_strings: Vec<String>,
    /// The deadline in milliseconds, after which no pass starts. 0 means no deadline. With a
    /// scheduler, the time starts when the request is submitted.
    pub deadline_ms: f64,
    /// The largest number of passes. 0 means that there is no limit.
    pub max_steps: i32,
    /// If true, the text of a special token in the prompt or in a message, such as `<|eos|>`, is
    /// encoded as this special token. If false, this text is encoded as ordinary text.
    pub special_tokens: bool,
}

impl Options {
    /// Converts the options to the C struct. The pointers in the C struct are valid as long as
    /// `self` and `stops` exist.
    fn raw(&self, stops: &Stops) -> sys::dlm_request {
        let mut request = MaybeUninit::<sys::dlm_request>::uninit();
        // SAFETY: init fills the struct.
        let mut request = unsafe {
            sys::dlm_request_init(request.as_mut_ptr(), size_of::<sys::dlm_request>());
            request.assume_init()
        };
        if let Some(count) = self.max_new_tokens {
            request.max_new_tokens = i32::try_from(count).unwrap_or(i32::MAX);
        }
        request.new_tokens = self.new_tokens.into();
        request.policy = self.policy.as_ref().map_or(null(), Policy::raw);
        request.constraint = self.constraint.as_ref().map_or(null(), Automaton::raw);
        if !stops.raw.is_empty() {
            request.stop_strings = stops.raw.as_ptr();
            request.stop_count = stops.raw.len();
        }
        request.deadline_ms = self.deadline_ms;
        request.max_steps = self.max_steps;
        request.special_tokens = self.special_tokens.into();
        request.text = sys::DLM_TEXT_RESULT;
        request
    }
}

/// Sets the prompt of a request. C needs a text for an empty prompt too, and an empty `str` has no
/// byte that C could read.
fn set_prompt(request: &mut sys::dlm_request, prompt: &str) {
    request.prompt = if prompt.is_empty() { b"\0".as_ptr().cast() } else { prompt.as_ptr().cast() };
    request.prompt_size = prompt.len();
}

/// The stop strings of a request in the form that C needs.
struct Stops {
    raw: Vec<*const c_char>,
    _strings: Vec<CString>,
}

impl Stops {
    fn new(options: &Options) -> Result<Self> {
        let strings = options.stop_strings.iter().map(|stop| c_string(stop)).collect::<Result<Vec<_>>>()?;
        Ok(Self { raw: strings.iter().map(|stop| stop.as_ptr()).collect(), _strings: strings })
    }
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finish {
    /// An end token or a stop string ended the text.
    Stop,
    /// All tokens were generated, and the text contains no end token.
    Length,
    /// [`Options::max_steps`] was reached.
    Steps,
    /// [`Options::deadline_ms`] was reached.
    Deadline,
    /// The request was cancelled.
    Cancelled,
    /// All tokens were generated without an end token, and the text of the constraint is complete.
    Constraint,
    /// A value of `DLM_FINISH_...` that this wrapper does not know.
    Other(i32),
}

impl From<i32> for Finish {
    fn from(finish: i32) -> Self {
        match finish {
            1 => Self::Stop,
            2 => Self::Length,
            3 => Self::Steps,
            4 => Self::Deadline,
            5 => Self::Cancelled,
            6 => Self::Constraint,
            other => Self::Other(other),
        }
    }
}

/// The result of a request.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The generated text before the first end token, without the prompt.
    pub text: String,
    /// The reason why the request ended.
    pub finish: Finish,
    /// The number of passes of the request.
    pub passes: i32,
    /// The number of tokens of the prompt.
    pub prompt_tokens: i32,
    /// The number of tokens that were generated before the first end token.
    pub completion_tokens: i32,
    /// For `Content::Decisions`: the probability of each option of all questions.
    pub option_probs: Vec<f64>,
}

impl Generation {
    /// SAFETY: `result` must be the library's result of a request that did not fail.
    unsafe fn new(result: *const sys::dlm_result) -> Self {
        // SAFETY: `text` points to `text_size` bytes, and `stats` is not NULL.
        let (result, text, stats) = unsafe {
            let result = &*result;
            (result, std::slice::from_raw_parts(result.text.cast::<u8>(), result.text_size), &*result.stats)
        };
        let option_probs = if result.option_probs.is_null() {
            Vec::new()
        } else {
            // SAFETY: `option_probs` points to `option_count` numbers.
            unsafe { std::slice::from_raw_parts(result.option_probs, result.option_count) }.to_vec()
        };
        Self {
            text: String::from_utf8_lossy(text).into_owned(),
            finish: result.finish.into(),
            passes: stats.nfe,
            prompt_tokens: result.prompt_tokens,
            completion_tokens: result.completion_tokens,
            option_probs,
        }
    }
}

/// The messages of a chat in the form that C needs. The texts are borrowed.
struct Messages<'a> {
    raw: Vec<sys::dlm_message>,
    _roles: Vec<CString>,
    _contents: PhantomData<&'a str>,
}

impl<'a> Messages<'a> {
    fn new(chat: &[(&'a str, &'a str)]) -> Result<Self> {
        let roles = chat.iter().map(|(role, _)| c_string(role)).collect::<Result<Vec<_>>>()?;
        let message_of = |((_, content), role): (&(&str, &str), &CString)| sys::dlm_message {
            role: role.as_ptr(),
            content: content.as_ptr().cast(),
            content_size: content.len(),
        };
        Ok(Self { raw: chat.iter().zip(&roles).map(message_of).collect(), _roles: roles, _contents: PhantomData })
    }
}

/// Generates one request at a time. A session may move between threads.
pub struct Session {
    raw: Arc<RawSession>,
    _not_sync: PhantomData<Cell<()>>,
}

/// The caller's function. If it has panicked, a listener also contains the value of the panic.
struct Listener<'a> {
    on_text: &'a mut dyn FnMut(&str) -> ControlFlow<()>,
    panicked: Option<Box<dyn Any + Send>>,
}

/// Calls the caller's function. A panic must not unwind through C. So this function stores the
/// value of a panic and ends the request.
extern "C" fn on_step(user: *mut c_void, step: *const sys::dlm_step) -> i32 {
    // SAFETY: `user` is the Listener of the running call, and the step's text is `text_size` bytes
    // of UTF-8.
    let (listener, text) = unsafe {
        let step = &*step;
        (&mut *user.cast::<Listener<'_>>(), std::slice::from_raw_parts(step.text.cast::<u8>(), step.text_size))
    };
    if text.is_empty() {
        return 0;
    }
    let told = AssertUnwindSafe(|| (listener.on_text)(&String::from_utf8_lossy(text)).is_break());
    catch_unwind(told).map_or_else(
        |panic| {
            listener.panicked = Some(panic);
            1
        },
        i32::from,
    )
}

impl Session {
    /// Creates a session. The session keeps its bundle open.
    pub fn new(bundle: &Bundle) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: all pointers are valid for the call.
        check(|message, capacity| unsafe { sys::dlm_session_create((bundle.0).0, message, capacity, &mut raw) })?;
        Ok(Self { raw: Arc::new(RawSession { raw, _bundle: bundle.0.clone() }), _not_sync: PhantomData })
    }

    /// Returns a handle with which other threads can end this session's requests.
    pub fn canceller(&self) -> Canceller {
        Canceller(self.raw.clone())
    }

    /// Generates the text after a prompt. `on_text` receives the text that each step adds, in whole
    /// characters. If `on_text` returns `Break`, the request ends with an error.
    pub fn generate_text(
        &mut self,
        prompt: &str,
        options: &Options,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        self.generate(options, on_text, |request| {
            set_prompt(request, prompt);
        })
    }

    /// Generates the assistant's answer to a chat, which is a list of roles and contents. `on_text`
    /// has the same meaning as in [`Session::generate_text`].
    pub fn generate_chat(
        &mut self,
        chat: &[(&str, &str)],
        options: &Options,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let messages = Messages::new(chat)?;
        self.generate(options, on_text, |request| {
            request.messages = messages.raw.as_ptr();
            request.message_count = messages.raw.len();
        })
    }

    /// Runs a request. `give` sets the request's prompt or chat.
    fn generate(
        &mut self,
        options: &Options,
        mut function: impl FnMut(&str) -> ControlFlow<()>,
        give: impl FnOnce(&mut sys::dlm_request),
    ) -> Result<Generation> {
        let stops = Stops::new(options)?;
        let mut request = options.raw(&stops);
        give(&mut request);
        let mut listener = Listener { on_text: &mut function, panicked: None };
        request.text = sys::DLM_TEXT_STEPS;
        request.on_step = Some(on_step);
        request.user = std::ptr::addr_of_mut!(listener).cast();
        let mut result = null();
        // SAFETY: all pointers are valid for the call.
        let status = unsafe { sys::dlm_session_generate(self.raw.raw, &request, &mut result) };
        if let Some(panic) = listener.panicked {
            resume_unwind(panic);
        }
        self.done(status)?;
        // SAFETY: the session owns the result, which is valid until the session's next request.
        Ok(unsafe { Generation::new(result) })
    }

    fn done(&self, status: sys::dlm_status) -> Result<()> {
        if status == sys::DLM_OK {
            return Ok(());
        }
        // SAFETY: the session owns the text, which ends with a NUL.
        Err(Error { status, sentence: unsafe { text_of(sys::dlm_session_last_error(self.raw.raw)) } })
    }
}

/// Compiles only if threads can share and move the types as dlm_runtime.h allows.
#[allow(dead_code)]
fn threads_are_as_the_header_says() {
    fn shared<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    shared::<Bundle>();
    shared::<Canceller>();
    shared::<Options>();
    shared::<Scheduler>();
    moved::<Session>();
    moved::<Job>();
}
