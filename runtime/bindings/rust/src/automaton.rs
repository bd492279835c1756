use std::mem::{size_of, MaybeUninit};
use std::ptr::null_mut;
use std::sync::Arc;

use crate::{check, sys, Bundle, Result};

#[derive(Debug)]
struct RawAutomaton(*mut sys::dlm_automaton);

// SAFETY: by dlm_runtime.h, any number of requests and threads may share an automaton.
unsafe impl Send for RawAutomaton {}
unsafe impl Sync for RawAutomaton {}

impl Drop for RawAutomaton {
    fn drop(&mut self) {
        // SAFETY: no other object uses the handle any more. Running requests keep the automaton
        // alive in the library.
        unsafe { sys::dlm_automaton_destroy(self.0) }
    }
}

/// The content of a constraint, which defines the texts that a request may generate.
#[derive(Debug, Clone, Copy)]
pub enum Content<'a> {
    /// The text matches this regular expression, which has the syntax of the regex crate.
    Regex(&'a str),
    /// The text is JSON that is valid against this JSON Schema.
    Schema(&'a str),
    /// The text is one of the strings in this JSON list.
    Enum(&'a str),
    /// The text is any JSON object.
    JsonObject,
    /// The text matches this tree of parts. The tree is JSON, as described in docs/guides/c-api.md.
    /// Parts may follow each other or be alternatives.
    Tree(&'a str),
    /// The text matches this grammar in GBNF.
    Grammar(&'a str),
    /// The text answers these questions. They are JSON, as described in `dlm_runtime.h`.
    Decisions(&'a str),
}

/// A compiled constraint for the vocabulary of one bundle. All clones of an `Automaton` refer to
/// the same compiled constraint.
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

    /// Reads and checks the content of a file that `dlm-export compile` wrote.
    pub fn read(data: &[u8]) -> Result<Self> {
        Self::made(null_mut(), sys::DLM_CONSTRAINT_COMPILED, data)
    }

    fn made(bundle: *mut sys::dlm_bundle, kind: i32, content: &[u8]) -> Result<Self> {
        let mut constraint = MaybeUninit::<sys::dlm_constraint>::uninit();
        let mut raw = null_mut();
        // SAFETY: init fills the struct; all pointers are valid for the call.
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
