//! A safe wrapper of libdlm_runtime, which generates text from bundles of dlm-export.
//!
//! Open a [`Bundle`] once and share it between threads. Each thread generates with its own [`Session`]; a [`Canceller`] ends a
//! session's request from any thread. A program with many requests at once hands them to a [`Scheduler`], whose requests share
//! passes. [`Options`] chooses a request's length, [`Policy`] and constraint ([`Automaton`]).
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

pub use automaton::Automaton;
pub use policy::Policy;
pub use scheduler::{Job, Scheduler};

/// Why a call failed.
#[derive(Debug, Clone)]
pub struct Error {
    /// The `dlm_status` of `dlm_runtime.h`, such as 2 for `DLM_NOT_FOUND`.
    pub status: i32,
    /// What happened, for people.
    pub sentence: String,
}

impl Error {
    fn invalid(sentence: String) -> Self {
        Self { status: sys::DLM_INVALID_ARGUMENT, sentence }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: static, never NULL.
        let name = unsafe { text_of(sys::dlm_status_name(self.status)) };
        write!(f, "{name}: {}", self.sentence)
    }
}

impl std::error::Error for Error {}

/// A result whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// SAFETY: `text` is NUL-terminated.
unsafe fn text_of(text: *const c_char) -> String {
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid(format!("{text:?} holds a NUL")))
}

/// Calls a C function that writes its error message to a buffer.
fn check(call: impl FnOnce(*mut c_char, usize) -> sys::dlm_status) -> Result<()> {
    let mut message = [0 as c_char; 1024];
    match call(message.as_mut_ptr(), message.len()) {
        sys::DLM_OK => Ok(()),
        // SAFETY: the library ends it with a NUL.
        status => Err(Error { status, sentence: unsafe { text_of(message.as_ptr()) } }),
    }
}

#[derive(Debug)]
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

/// An open bundle. A clone refers to the same bundle, which closes with its last clone, session, scheduler and policy.
#[derive(Debug, Clone)]
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

    /// The `max_new_tokens` of a request that sets none.
    pub fn max_new_tokens(&self) -> u32 {
        // SAFETY: the handle is open.
        unsafe { sys::dlm_bundle_max_new_tokens((self.0).0) }.unsigned_abs()
    }

    /// One of the bundle's presets by its name, such as `"fast-dllm"`. The error for an unknown name lists all of them.
    pub fn preset(&self, name: &str) -> Result<Policy> {
        Policy::from_call(self, name, sys::dlm_bundle_preset)
    }

    /// An effort level: `"instant"`, `"low"`, `"medium"` or `"high"`. Fails for a bundle without levels, which
    /// `dlm-export effort` adds.
    pub fn effort(&self, level: &str) -> Result<Policy> {
        Policy::from_call(self, level, sys::dlm_bundle_effort)
    }

    /// The engine that runs the bundle, as one line for people.
    pub fn engine(&self) -> String {
        // SAFETY: the bundle's own, NUL-terminated.
        unsafe { text_of(sys::dlm_bundle_engine((self.0).0)) }
    }

    fn text(&self) -> Result<*const sys::dlm_text> {
        let mut text = null();
        // SAFETY: valid for the call; the text lives as long as the bundle.
        check(|message, capacity| unsafe { sys::dlm_bundle_text((self.0).0, message, capacity, &mut text) })?;
        Ok(text)
    }

    /// Token ids of a prompt, with the tokens that the tokenizer puts around one.
    fn encode_prompt(&self, string: &str, flags: i32) -> Result<Vec<i32>> {
        let text = self.text()?;
        filled(|message, capacity, tokens: &mut Vec<i32>, count| unsafe {
            // SAFETY: all valid for the call; `tokens` has room for its length.
            let (start, room) = (string.as_ptr().cast(), tokens.len());
            sys::dlm_text_encode(
                text,
                start,
                string.len(),
                sys::DLM_ENCODE_PROMPT | flags,
                message,
                capacity,
                tokens.as_mut_ptr(),
                room,
                count,
            )
        })
    }

    fn decode(&self, tokens: &[i32]) -> Result<String> {
        let text = self.text()?;
        let bytes = filled(|message, capacity, bytes: &mut Vec<u8>, size| unsafe {
            // SAFETY: as in `encode_prompt`.
            let (start, room) = (bytes.as_mut_ptr().cast(), bytes.len());
            sys::dlm_text_decode(text, tokens.as_ptr(), tokens.len(), message, capacity, start, room, size)
        })?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Token ids of a chat, up to where the assistant answers.
    fn encode_chat(&self, chat: &[(&str, &str)], flags: i32) -> Result<Vec<i32>> {
        let (text, messages) = (self.text()?, Messages::new(chat)?);
        filled(|message, capacity, tokens: &mut Vec<i32>, size| unsafe {
            // SAFETY: as in `encode_prompt`.
            let (start, room) = (tokens.as_mut_ptr(), tokens.len());
            let (first, count) = (messages.raw.as_ptr(), messages.raw.len());
            sys::dlm_chat_encode(text, first, count, flags, message, capacity, start, room, size)
        })
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

/// Ends a session's running request from any thread.
#[derive(Clone)]
pub struct Canceller(Arc<RawSession>);

impl Canceller {
    /// Ends the request within one pass. It returns what it has, with [`Finish::Cancelled`].
    pub fn cancel(&self) {
        // SAFETY: from any thread; the Arc keeps the session.
        unsafe { sys::dlm_session_cancel(self.0.raw, 0) }
    }
}

/// How a request is generated. `Options::default()` takes the bundle's own length and default preset.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// How many tokens to generate at most; `None`: the bundle's own number, [`Bundle::max_new_tokens`].
    pub max_new_tokens: Option<u32>,
    /// The decoding loop; `None`: the bundle's default preset.
    pub policy: Option<Policy>,
    /// The texts that are allowed; `None`: any text.
    pub constraint: Option<Automaton>,
    /// Milliseconds after which no pass starts; 0: no deadline. For a scheduler's request they count from its submission.
    pub deadline_ms: f64,
    /// How many passes the request makes at most; 0: any number.
    pub max_steps: i32,
    /// If true, text of the prompt or of a message that spells a special token, such as `<|eos|>`, is that token. If false, it is
    /// ordinary text.
    pub special_tokens: bool,
}

impl Options {
    /// As C takes them. The pointers in the struct are valid as long as `self`.
    fn raw(&self) -> sys::dlm_generate_options {
        let mut given = MaybeUninit::<sys::dlm_generate_options>::uninit();
        // SAFETY: init fills the struct.
        let mut given = unsafe {
            sys::dlm_generate_options_init_sized(given.as_mut_ptr(), size_of::<sys::dlm_generate_options>());
            given.assume_init()
        };
        if let Some(count) = self.max_new_tokens {
            given.max_new_tokens = i32::try_from(count).unwrap_or(i32::MAX); // the library says what is too long
        }
        given.policy = self.policy.as_ref().map_or(null(), Policy::raw);
        given.deadline_ms = self.deadline_ms;
        given.max_steps = self.max_steps;
        given.special_tokens = self.special_tokens.into();
        given
    }

    /// The flags of `dlm_text_encode` and `dlm_chat_encode` for text of a request.
    fn encode_flags(&self) -> i32 {
        if self.special_tokens {
            sys::DLM_ENCODE_SPECIAL
        } else {
            0
        }
    }

    fn automaton(&self) -> *const sys::dlm_automaton {
        self.constraint.as_ref().map_or(null(), Automaton::raw)
    }
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finish {
    /// The denoiser wrote an end token.
    Stop,
    /// All tokens were generated, without an end token.
    Length,
    /// [`Options::max_steps`] passes were made.
    Steps,
    /// [`Options::deadline_ms`] was over.
    Deadline,
    /// The request was cancelled.
    Cancelled,
    /// The text of the constraint is complete.
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

/// What a request generated.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The generated text, without the prompt, up to the first end token.
    pub text: String,
    /// Why the request ended.
    pub finish: Finish,
    /// How many passes the request took part in.
    pub passes: i32,
    /// How many tokens the prompt has.
    pub prompt_tokens: i32,
    /// How many tokens were generated before the first end token.
    pub completion_tokens: i32,
}

impl Generation {
    fn new(text: String, result: &sys::dlm_result) -> Self {
        Self {
            text,
            finish: result.finish.into(),
            passes: result.nfe,
            prompt_tokens: result.prompt_tokens,
            completion_tokens: result.completion_tokens,
        }
    }
}

/// Messages of a chat as C takes them; the texts are borrowed.
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

/// Calls a C function once for the size of what it writes, and again with room for it.
fn filled<T: Clone + Default>(call: impl Fn(*mut c_char, usize, &mut Vec<T>, *mut usize) -> sys::dlm_status) -> Result<Vec<T>> {
    let (mut out, mut count) = (Vec::new(), 0);
    loop {
        check(|message, capacity| call(message, capacity, &mut out, &mut count))?;
        if count <= out.len() {
            return Ok(out);
        }
        out.resize(count, T::default());
    }
}

/// Generates one request at a time. It may move between threads.
pub struct Session {
    raw: Arc<RawSession>,
    _not_sync: PhantomData<Cell<()>>,
}

/// The caller's function, and what it panicked with.
struct Listener<'a> {
    on_text: &'a mut dyn FnMut(&str) -> ControlFlow<()>,
    panicked: Option<Box<dyn Any + Send>>,
}

/// A panic must not unwind through C, so it is kept and ends the request.
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
    /// Creates a session, which keeps its bundle open.
    pub fn new(bundle: &Bundle) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: valid for the call.
        check(|message, capacity| unsafe { sys::dlm_session_create((bundle.0).0, message, capacity, &mut raw) })?;
        Ok(Self { raw: Arc::new(RawSession { raw, _bundle: bundle.0.clone() }), _not_sync: PhantomData })
    }

    /// A handle that ends this session's requests from other threads.
    pub fn canceller(&self) -> Canceller {
        Canceller(self.raw.clone())
    }

    /// Generates the text after a prompt. `on_text` receives the text that each step adds, in whole characters; `Break` ends the
    /// request with an error.
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

    /// Generates the assistant's answer to a chat, a list of roles and contents. `on_text` is as in [`Session::generate_text`].
    pub fn generate_chat(
        &mut self,
        chat: &[(&str, &str)],
        options: &Options,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let messages = Messages::new(chat)?;
        self.generate(options, on_text, |session, options, function, user, text, size| {
            let (start, count) = (messages.raw.as_ptr(), messages.raw.len());
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
        let given = options.raw();
        // SAFETY: both valid for the call.
        self.done(unsafe { sys::dlm_session_constrain(self.raw.raw, options.automaton()) })?;
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
        Ok(Generation::new(text, &result))
    }

    fn done(&self, status: sys::dlm_status) -> Result<()> {
        if status == sys::DLM_OK {
            return Ok(());
        }
        // SAFETY: NUL-terminated, the session's.
        Err(Error { status, sentence: unsafe { text_of(sys::dlm_session_last_error(self.raw.raw)) } })
    }
}

/// Compiles only if the types may be shared and moved as the header says.
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
