use std::os::raw::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use crate::{c_string, check, sys, Result};

#[derive(Debug)]
struct RawAutomaton(*mut sys::dlm_automaton);

// SAFETY: dlm_runtime.h: any number of sessions and threads may share one.
unsafe impl Send for RawAutomaton {}
unsafe impl Sync for RawAutomaton {}

impl Drop for RawAutomaton {
    fn drop(&mut self) {
        // SAFETY: nobody refers to it any more; requests that began with it have their own reference in the library.
        unsafe { sys::dlm_automaton_destroy(self.0) }
    }
}

/// The texts that a request may generate. `dlm-export compile` writes its file, for the vocabulary of one bundle. Clones share it.
#[derive(Debug, Clone)]
pub struct Automaton(Arc<RawAutomaton>);

impl Automaton {
    /// Reads and checks a file.
    pub fn open(path: &str) -> Result<Self> {
        let (path, mut raw) = (c_string(path)?, null_mut());
        // SAFETY: all valid for the call.
        check(|message, capacity| unsafe { sys::dlm_automaton_open(path.as_ptr(), message, capacity, &mut raw) })?;
        Ok(Self(Arc::new(RawAutomaton(raw))))
    }

    /// Reads and checks the content of such a file.
    pub fn read(data: &[u8]) -> Result<Self> {
        let (start, mut raw) = (data.as_ptr().cast::<c_void>(), null_mut());
        // SAFETY: all valid for the call.
        check(|message, capacity| unsafe { sys::dlm_automaton_read(start, data.len(), message, capacity, &mut raw) })?;
        Ok(Self(Arc::new(RawAutomaton(raw))))
    }

    pub(crate) fn raw(&self) -> *const sys::dlm_automaton {
        (self.0).0
    }
}
