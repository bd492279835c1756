//! schedule BUNDLE PRESET AUTOMATON PROMPT... submits all prompts to a scheduler at the same time,
//! and prints one answer per line. PRESET is the name of a preset, or - for the bundle's default
//! preset. AUTOMATON is a file that `dlm-export compile` wrote, or - for no constraint.

use std::process::ExitCode;

use dlm_runtime::{Automaton, Bundle, Error, Options, Scheduler};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.len() < 5 {
        eprintln!("usage: schedule BUNDLE PRESET AUTOMATON PROMPT...");
        return ExitCode::from(2);
    }
    match schedule(&arguments[1], &arguments[2], &arguments[3], &arguments[4..]) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("schedule: {why}");
            ExitCode::FAILURE
        }
    }
}

fn schedule(path: &str, preset: &str, automaton: &str, prompts: &[String]) -> Result<(), Error> {
    let bundle = Bundle::open(path, 0)?;
    let mut options = Options::default();
    if preset != "-" {
        options.policy = Some(bundle.preset(preset)?);
    }
    if automaton != "-" {
        options.constraint = Some(Automaton::open(automaton)?);
    }
    let scheduler = Scheduler::new(&bundle)?;
    let jobs = prompts.iter().map(|prompt| scheduler.submit_text(prompt, &options)).collect::<Result<Vec<_>, _>>()?;
    for job in jobs {
        let out = job.wait()?;
        println!("{}", out.text);
        eprintln!("{} passes, {:?}", out.passes, out.finish);
    }
    Ok(())
}
