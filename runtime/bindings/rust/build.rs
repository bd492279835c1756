//! Links libdlm_runtime from `$DLM_RUNTIME_LIB_DIR`, or from the folder that pkg-config names.
//!
//! By default, the static library is linked. Then a program that depends on this crate needs no
//! settings to start. With the feature `shared`, a program loads `libdlm_runtime.so` when it
//! starts. The programs of this crate then contain an rpath. A program that depends on this crate
//! needs `LD_LIBRARY_PATH`, or its build script must set an rpath to the folder in
//! `DEP_DLM_RUNTIME_LIB_DIR`:
//!
//! ```text
//! println!("cargo:rustc-link-arg-bins=-Wl,-rpath,{}", std::env::var("DEP_DLM_RUNTIME_LIB_DIR").unwrap());
//! ```

use std::env;
use std::process::Command;

fn main() {
    for name in ["DLM_RUNTIME_LIB_DIR", "PKG_CONFIG", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let folder = env::var("DLM_RUNTIME_LIB_DIR").unwrap_or_else(|_| from_pkg_config());
    println!("cargo:lib_dir={folder}");
    println!("cargo:rustc-link-search=native={folder}");
    if env::var_os("CARGO_FEATURE_SHARED").is_some() {
        println!("cargo:rustc-link-lib=dylib=dlm_runtime");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
        return;
    }
    println!("cargo:rerun-if-changed={folder}/libdlm_runtime.a");
    println!("cargo:rustc-link-lib=static=dlm_runtime");
    for needed in ["stdc++", "m", "dl", "pthread"] {
        println!("cargo:rustc-link-lib=dylib={needed}");
    }
}

fn from_pkg_config() -> String {
    let program = env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".into());
    match Command::new(&program).args(["--variable=libdir", "dlm_runtime"]).output() {
        Err(why) => refuse(&format!("{program}: {why}. Install it, or set DLM_RUNTIME_LIB_DIR")),
        Ok(done) if !done.status.success() => refuse(&format!(
            "{}Set PKG_CONFIG_PATH to PREFIX/lib/pkgconfig of the installed library, or DLM_RUNTIME_LIB_DIR",
            String::from_utf8_lossy(&done.stderr)
        )),
        Ok(done) => String::from_utf8_lossy(&done.stdout).trim().to_string(),
    }
}

fn refuse(sentence: &str) -> ! {
    eprintln!("{sentence}");
    std::process::exit(1)
}
