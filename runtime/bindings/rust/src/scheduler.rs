use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crate::{check, set_prompt, sys, text_of, Bundle, Error, Generation, Messages, Options, Result, Stops};

struct RawScheduler {
    raw: *mut sys::dlm_scheduler,
    _bundle: Bundle, // the bundle outlives `raw`
}

// SAFETY: by dlm_runtime.h, threads may share a scheduler.
unsafe impl Send for RawScheduler {}
unsafe impl Sync for RawScheduler {}

impl Drop for RawScheduler {
    fn drop(&mut self) {
        // SAFETY: no thread runs the scheduler any more.
        unsafe { sys::dlm_scheduler_destroy(self.raw) }
    }
}

/// Runs the requests of any number of threads in shared passes, on a thread of its own.
///
/// When the scheduler is dropped, unfinished requests end with
/// [`Finish::Cancelled`](crate::Finish::Cancelled).
pub struct Scheduler {
    raw: Arc<RawScheduler>,
    bundle: Bundle,
    passes: Option<JoinHandle<()>>,
}

impl Scheduler {
    /// Creates a scheduler with the default limits of `dlm_scheduler_options`, and starts its
    /// thread.
    pub fn new(bundle: &Bundle) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: all pointers are valid for the call.
        check(|message, capacity| unsafe { sys::dlm_scheduler_create((bundle.0).0, null(), message, capacity, &mut raw) })?;
        let raw = Arc::new(RawScheduler { raw, _bundle: bundle.clone() });
        let run = raw.clone();
        let passes = move || {
            // If dlm_scheduler_run fails, every job fails with the same error, and Job::wait
            // returns it. SAFETY: this is the only thread that runs the scheduler.
            let _ =
                check(|message, capacity| unsafe { sys::dlm_scheduler_run(run.raw, 0, None, null_mut(), message, capacity) });
        };
        let passes = Builder::new()
            .name("dlm-scheduler".into())
            .spawn(passes)
            .map_err(|why| Error { status: sys::DLM_OUT_OF_MEMORY, sentence: format!("cannot start a thread: {why}") })?;
        Ok(Self { raw, bundle: bundle.clone(), passes: Some(passes) })
    }

    /// Submits a request that generates the text after a prompt. Fails with `DLM_BUSY` (status 10)
    /// if too many requests are waiting.
    pub fn submit_text(&self, prompt: &str, options: &Options) -> Result<Job> {
        self.submit(options, |request| {
            set_prompt(request, prompt);
        })
    }

    /// Submits a request that generates the assistant's answer to a chat, which is a list of roles
    /// and contents.
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
        // SAFETY: all pointers are valid for the call, and the library copies the data that it
        // needs later.
        check(|message, capacity| unsafe { sys::dlm_scheduler_submit(self.raw.raw, &request, message, capacity, &mut raw) })?;
        Ok(Job { raw, _bundle: self.bundle.clone(), _not_sync: PhantomData })
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // SAFETY: any thread may call this function.
        unsafe { sys::dlm_scheduler_stop(self.raw.raw) }
        if let Some(passes) = self.passes.take() {
            let _ = passes.join(); // the thread does not panic
        }
    }
}

/// A request that was submitted to a [`Scheduler`]. If a job is dropped before its request is
/// finished, the request is cancelled.
pub struct Job {
    raw: *mut sys::dlm_job,
    _bundle: Bundle, // the bundle outlives `raw`
    _not_sync: PhantomData<Cell<()>>,
}

// SAFETY: by dlm_runtime.h, any thread may use a job, but only one thread at a time. `Job` is not
// `Sync`, so two threads cannot use a job at the same time.
unsafe impl Send for Job {}

impl Job {
    /// Returns true if the request is finished. [`Job::wait`] then returns at once.
    pub fn is_done(&self) -> bool {
        // SAFETY: the handle is open.
        unsafe { sys::dlm_job_wait(self.raw, 0.0) != 0 }
    }

    /// Ends the request after at most one more pass. Then [`Job::wait`] returns the text so far and
    /// [`Finish::Cancelled`](crate::Finish::Cancelled).
    pub fn cancel(&self) {
        // SAFETY: any thread may call this function.
        unsafe { sys::dlm_job_cancel(self.raw) }
    }

    /// Waits until the request is finished. Returns its result, or an error if it failed.
    pub fn wait(self) -> Result<Generation> {
        let mut result = null();
        // SAFETY: the request has ended, so the result exists. The result is valid until the job is
        // destroyed.
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
        // SAFETY: no other object uses the job any more. The request has no callback, so the
        // library calls no function of the program.
        unsafe { sys::dlm_job_destroy(self.raw) }
    }
}
