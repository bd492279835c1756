use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crate::{check, sys, text_of, Bundle, Error, Generation, Messages, Options, Result, Stops};

struct RawScheduler {
    raw: *mut sys::dlm_scheduler,
    _bundle: Bundle, // outlives it
}

// SAFETY: dlm_runtime.h, threads: a scheduler may be shared.
unsafe impl Send for RawScheduler {}
unsafe impl Sync for RawScheduler {}

impl Drop for RawScheduler {
    fn drop(&mut self) {
        // SAFETY: nobody runs it any more.
        unsafe { sys::dlm_scheduler_destroy(self.raw) }
    }
}

/// Runs requests of any number of threads in passes that they share, on a thread that it starts.
///
/// When it is dropped, requests that are not done end with [`Finish::Cancelled`](crate::Finish::Cancelled).
pub struct Scheduler {
    raw: Arc<RawScheduler>,
    bundle: Bundle,
    passes: Option<JoinHandle<()>>,
}

impl Scheduler {
    /// Creates a scheduler with the default limits of `dlm_scheduler_options`, and starts its thread.
    pub fn new(bundle: &Bundle) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: all valid for the call.
        check(|message, capacity| unsafe { sys::dlm_scheduler_create((bundle.0).0, null(), message, capacity, &mut raw) })?;
        let raw = Arc::new(RawScheduler { raw, _bundle: bundle.clone() });
        let run = raw.clone();
        let passes = move || {
            // A failure of the thread is each job's own failure, which Job::wait returns.
            // SAFETY: this is the only thread that runs it.
            let _ =
                check(|message, capacity| unsafe { sys::dlm_scheduler_run(run.raw, 0, None, null_mut(), message, capacity) });
        };
        let passes = Builder::new()
            .name("dlm-scheduler".into())
            .spawn(passes)
            .map_err(|why| Error { status: sys::DLM_OUT_OF_MEMORY, sentence: format!("cannot start a thread: {why}") })?;
        Ok(Self { raw, bundle: bundle.clone(), passes: Some(passes) })
    }

    /// Hands in a request for the text after a prompt. Fails with `DLM_BUSY` (status 10) if too many requests wait.
    pub fn submit_text(&self, prompt: &str, options: &Options) -> Result<Job> {
        self.submit(options, |request| {
            request.prompt = prompt.as_ptr().cast();
            request.prompt_size = prompt.len();
        })
    }

    /// Hands in a request for the assistant's answer to a chat, a list of roles and contents.
    pub fn submit_chat(&self, chat: &[(&str, &str)], options: &Options) -> Result<Job> {
        let messages = Messages::new(chat)?;
        self.submit(options, |request| {
            request.messages = messages.raw.as_ptr();
            request.message_count = messages.raw.len();
        })
    }

    fn submit(&self, options: &Options, give: impl FnOnce(&mut sys::dlm_request)) -> Result<Job> {
        let stops = Stops::new(options)?;
        let (mut request, mut raw) = (options.raw(&stops), null_mut());
        give(&mut request);
        // SAFETY: all valid for the call, which copies what it keeps.
        check(|message, capacity| unsafe { sys::dlm_scheduler_submit(self.raw.raw, &request, message, capacity, &mut raw) })?;
        Ok(Job { raw, _bundle: self.bundle.clone(), _not_sync: PhantomData })
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // SAFETY: from any thread.
        unsafe { sys::dlm_scheduler_stop(self.raw.raw) }
        if let Some(passes) = self.passes.take() {
            let _ = passes.join(); // it does not panic
        }
    }
}

/// A request that was handed to a [`Scheduler`]. It is cancelled if it is dropped before it is done.
pub struct Job {
    raw: *mut sys::dlm_job,
    _bundle: Bundle, // outlives it
    _not_sync: PhantomData<Cell<()>>,
}

// SAFETY: dlm_runtime.h, threads: a job belongs to one thread at a time.
unsafe impl Send for Job {}

impl Job {
    /// Whether the request is done, so that [`Job::wait`] returns at once.
    pub fn is_done(&self) -> bool {
        // SAFETY: the handle is open.
        unsafe { sys::dlm_job_wait(self.raw, 0.0) != 0 }
    }

    /// Ends the request within one pass. [`Job::wait`] returns what it has, with [`Finish::Cancelled`](crate::Finish::Cancelled).
    pub fn cancel(&self) {
        // SAFETY: from any thread.
        unsafe { sys::dlm_job_cancel(self.raw) }
    }

    /// Waits until the request is done and returns what it generated, or why it failed.
    pub fn wait(self) -> Result<Generation> {
        let mut result = null();
        // SAFETY: the result is the job's until it is destroyed, and is there once the request has ended.
        unsafe {
            sys::dlm_job_wait(self.raw, -1.0);
            match sys::dlm_job_result(self.raw, &mut result) {
                sys::DLM_OK => Ok(Generation::new(result)),
                status => Err(Error { status, sentence: text_of((*result).message) }),
            }
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // SAFETY: nobody uses it any more. The request has no callback, so nothing of it is called later.
        unsafe { sys::dlm_job_destroy(self.raw) }
    }
}
