use std::ffi::{CStr, CString};
use std::mem::{size_of, MaybeUninit};
use std::os::raw::c_char;
use std::ptr::null;

use crate::{c_string, check, sys, Bundle, Error, Result};

/// A policy decides which tokens are committed after each pass. A policy starts as a preset
/// ([`Bundle::preset`]) or an effort level ([`Bundle::effort`]) of a bundle, and the program can
/// change its fields. They are documented at `dlm_policy` in `dlm_runtime.h`.
#[derive(Debug, Clone)]
pub struct Policy {
    raw: sys::dlm_policy,
    _bundle: Bundle, // owns the strings in `raw`
}

// SAFETY: the strings that `raw` points to are constant, and exist as long as the bundle.
unsafe impl Send for Policy {}
unsafe impl Sync for Policy {}

impl Policy {
    pub(crate) fn of_bundle(bundle: &Bundle, preset: Option<&str>, effort: Option<&str>) -> Result<Self> {
        let (preset, effort) = (preset.map(c_string).transpose()?, effort.map(c_string).transpose()?);
        let pointer = |name: &Option<CString>| name.as_ref().map_or(null(), |name| name.as_ptr());
        let mut policy = MaybeUninit::<sys::dlm_policy>::uninit();
        // SAFETY: init fills the struct; all pointers are valid for the call.
        check(|message, capacity| unsafe {
            sys::dlm_policy_init(policy.as_mut_ptr(), size_of::<sys::dlm_policy>());
            let handle = (bundle.0).0;
            sys::dlm_bundle_policy(handle, pointer(&preset), pointer(&effort), message, capacity, policy.as_mut_ptr())
        })?;
        // SAFETY: init filled the struct.
        Ok(Self { raw: unsafe { policy.assume_init() }, _bundle: bundle.clone() })
    }

    pub(crate) fn raw(&self) -> *const sys::dlm_policy {
        &self.raw
    }

    /// Changes a numeric field, such as `("temperature", 0.7)`. The library checks the range of most fields when a request starts.
    pub fn set(&mut self, name: &str, value: f64) -> Result<()> {
        let field = field_of(name)?;
        if field.kind == sys::DLM_FIELD_CHOICE {
            return Err(Error::invalid(format!("policy: {name} is a text: use set_choice")));
        }
        let is_whole = field.kind == sys::DLM_FIELD_DOUBLE || value.fract() == 0.0;
        if !is_whole || !(field.lowest..=field.highest).contains(&value) {
            let kind = if field.kind == sys::DLM_FIELD_DOUBLE { "a number" } else { "a whole number" };
            let (lowest, highest) = (field.lowest, field.highest);
            return Err(Error::invalid(format!("policy: {name} = {value} is not {kind} in {lowest}..{highest}")));
        }
        // SAFETY: the description of the field gives this offset and this type.
        unsafe {
            let place = std::ptr::addr_of_mut!(self.raw).cast::<u8>().add(field.offset);
            match field.kind {
                sys::DLM_FIELD_INT32 => place.cast::<i32>().write(value as i32),
                sys::DLM_FIELD_DOUBLE => place.cast::<f64>().write(value),
                _ => place.cast::<u64>().write(value as u64),
            }
        }
        Ok(())
    }

    /// Changes a field whose value is a string, for example `("select", "sample")`.
    pub fn set_choice(&mut self, name: &str, value: &str) -> Result<()> {
        let field = field_of(name)?;
        if field.kind != sys::DLM_FIELD_CHOICE {
            return Err(Error::invalid(format!("policy: {name} is a number: use set")));
        }
        let mut known = Vec::new();
        let mut next = field.choices;
        // SAFETY: `choices` is a static list of static strings that ends with NULL. The field at
        // this offset is such a string.
        unsafe {
            while !(*next).is_null() {
                let choice = CStr::from_ptr(*next).to_string_lossy();
                if choice == value {
                    let place = std::ptr::addr_of_mut!(self.raw).cast::<u8>().add(field.offset);
                    place.cast::<*const c_char>().write(*next);
                    return Ok(());
                }
                known.push(choice);
                next = next.add(1);
            }
        }
        Err(Error::invalid(format!("policy: {name} = {value:?} is not one of {}", known.join(", "))))
    }
}

/// Returns the library's description of a field. A field that this wrapper's struct does not have
/// counts as unknown.
fn field_of(name: &str) -> Result<&'static sys::dlm_policy_field> {
    // SAFETY: the library returns static descriptions, and NULL after the last one. Each name ends
    // with a NUL.
    unsafe {
        for index in 0.. {
            let Some(field) = sys::dlm_policy_field_at(index).as_ref() else { break };
            if CStr::from_ptr(field.name).to_bytes() == name.as_bytes() && field.offset < size_of::<sys::dlm_policy>() {
                return Ok(field);
            }
        }
    }
    Err(Error::invalid(format!("policy: there is no field {name:?}")))
}
