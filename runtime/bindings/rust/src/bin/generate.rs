//! generate BUNDLE NEW_TOKENS PROMPT prints the generated text to stdout while it is generated, and
//! the number of passes to stderr.

use std::io::Write;
use std::ops::ControlFlow;
use std::process::ExitCode;

use dlm_runtime::{Bundle, Options, Session};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let new_tokens = arguments.get(2).and_then(|text| text.parse().ok());
    let (4, Some(max_new_tokens)) = (arguments.len(), new_tokens) else {
        eprintln!("usage: generate BUNDLE NEW_TOKENS PROMPT");
        return ExitCode::from(2);
    };
    match generate(&arguments[1], &arguments[3], &Options { max_new_tokens: Some(max_new_tokens), ..Options::default() }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("generate: {why}");
            ExitCode::FAILURE
        }
    }
}

fn generate(path: &str, prompt: &str, options: &Options) -> Result<(), dlm_runtime::Error> {
    let bundle = Bundle::open(path, 0)?;
    let mut session = Session::new(&bundle)?;
    let out = session.generate_text(prompt, options, |delta| {
        print!("{delta}");
        match std::io::stdout().flush() {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    })?;
    println!();
    eprintln!("{} passes, {:?}, {}", out.passes, out.finish, bundle.engine());
    Ok(())
}
