use std::mem::{size_of, MaybeUninit};
use std::ptr::null_mut;
use std::sync::Arc;

use crate::{check, sys, Bundle, Result};

#[derive(Debug)]
struct RawAutomaton(*mut sys::dlm_automaton);

// SAFETY: dlm_runtime.h: any number of sessions and threads may share one.
unsafe impl Send for RawAutomaton {}
unsafe impl Sync for RawAutomaton {}

impl Drop for RawAutomaton {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the handle any more. Requests that began with it have their own
        // reference in the library.
        unsafe { sys::dlm_automaton_destroy(self.0) }
    }
}

/// The texts that a request may generate.
#[derive(Debug, Clone, Copy)]
pub enum Content<'a> {
    /// A match of the whole regular expression, in the syntax of the regex crate.
    Regex(&'a str),
    /// JSON that is valid by a JSON Schema.
    Schema(&'a str),
    /// One of the strings of a JSON list.
    Enum(&'a str),
    /// Any JSON object.
    JsonObject,
    /// Parts in sequence or as alternatives, as JSON in the form that docs/guides/c-api.md
    /// describes.
    Tree(&'a str),
    /// A text that a grammar in GBNF accepts.
    Grammar(&'a str),
    /// The questions of a decision, as `dlm_runtime.h` describes.
    Decisions(&'a str),
}

/// A compiled constraint: the texts that a request may generate. It is compiled for the vocabulary
/// of one bundle. Clones share it.
#[derive(Debug, Clone)]
pub struct Automaton(Arc<RawAutomaton>);

impl Automaton {
    /// Compiles a constraint for the vocabulary of a bundle.
    pub fn compile(bundle: &Bundle, content: Content) -> Result<Self> {
        let (kind, text) = match content {
            Content::Regex(text) => (sys::DLM_CONSTRAINT_REGEX, text),
            Content::Schema(text) => (sys::DLM_CONSTRAINT_SCHEMA, text),
            Content::Enum(text) => (sys::DLM_CONSTRAINT_ENUM, text),
            Content::JsonObject => (sys::DLM_CONSTRAINT_JSON_OBJECT, ""),
            Content::Tree(text) => (sys::DLM_CONSTRAINT_TREE, text),
            Content::Grammar(text) => (sys::DLM_CONSTRAINT_GRAMMAR, text),
            Content::Decisions(text) => (sys::DLM_CONSTRAINT_DECISIONS, text),
        };
        Self::made((bundle.0).0, kind, text.as_bytes())
    }

    /// Reads and checks a file that `dlm-export compile` wrote.
    pub fn open(path: &str) -> Result<Self> {
        Self::made(null_mut(), sys::DLM_CONSTRAINT_FILE, path.as_bytes())
    }

    /// Reads and checks the content of such a file.
    pub fn read(data: &[u8]) -> Result<Self> {
        Self::made(null_mut(), sys::DLM_CONSTRAINT_COMPILED, data)
    }

    fn made(bundle: *mut sys::dlm_bundle, kind: i32, content: &[u8]) -> Result<Self> {
        let mut constraint = MaybeUninit::<sys::dlm_constraint>::uninit();
        let mut raw = null_mut();
        // SAFETY: init fills the struct; the others are valid for the call.
        check(|message, capacity| unsafe {
            sys::dlm_constraint_init(constraint.as_mut_ptr(), size_of::<sys::dlm_constraint>());
            let mut constraint = constraint.assume_init();
            constraint.kind = kind;
            constraint.content = content.as_ptr().cast();
            constraint.content_size = content.len();
            sys::dlm_automaton_compile(bundle, &constraint, message, capacity, &mut raw)
        })?;
        Ok(Self(Arc::new(RawAutomaton(raw))))
    }

    pub(crate) fn raw(&self) -> *const sys::dlm_automaton {
        (self.0).0
    }
}
