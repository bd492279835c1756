//! Finds libdlm_runtime: in `$DLM_RUNTIME_LIB_DIR`, or where pkg-config says.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=DLM_RUNTIME_LIB_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let folders = match env::var("DLM_RUNTIME_LIB_DIR") {
        Ok(folder) => vec![folder],
        Err(_) => from_pkg_config(),
    };
    println!("cargo:rustc-link-lib=dylib=dlm_runtime");
    for folder in folders {
        println!("cargo:rustc-link-search=native={folder}");
        println!("cargo:rustc-link-arg-bins=-Wl,-rpath,{folder}"); // programs run without LD_LIBRARY_PATH
    }
}

fn from_pkg_config() -> Vec<String> {
    let program = env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".into());
    match Command::new(&program).args(["--libs-only-L", "dlm_runtime"]).output() {
        Err(why) => refuse(&format!("{program}: {why}. Install it, or set DLM_RUNTIME_LIB_DIR")),
        Ok(done) if !done.status.success() => refuse(&format!(
            "{}Set PKG_CONFIG_PATH to PREFIX/lib/pkgconfig of the installed library, or DLM_RUNTIME_LIB_DIR",
            String::from_utf8_lossy(&done.stderr)
        )),
        Ok(done) => {
            let flags = String::from_utf8_lossy(&done.stdout);
            flags.split_whitespace().filter_map(|flag| flag.strip_prefix("-L")).map(String::from).collect()
        }
    }
}

fn refuse(sentence: &str) -> ! {
    eprintln!("{sentence}");
    std::process::exit(1)
}
