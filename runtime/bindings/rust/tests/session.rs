//! Tests of the wrapper. `$DLM_BUNDLE` is the bundle under test, and `$DLM_EFFORT_BUNDLE` is a
//! bundle with effort levels. `$DLM_AUTOMATON` is a constraint file for their vocabulary that
//! allows "yes" and "no".

use std::ops::ControlFlow;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::thread;

use dlm_runtime::{Automaton, Bundle, Content, Finish, Options, Scheduler, Session};

const PROMPT: &str = "turn on the kitchen lights";

fn given(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

fn bundle() -> Bundle {
    Bundle::open(&given("DLM_BUNDLE"), 1).unwrap()
}

/// Returns the text that a new session generates for a prompt.
fn alone(bundle: &Bundle, prompt: &str, options: &Options) -> String {
    Session::new(bundle).unwrap().generate_text(prompt, options, |_| ControlFlow::Continue(())).unwrap().text
}

fn few() -> Options {
    Options { max_new_tokens: Some(40), ..Options::default() }
}

#[test]
fn threads_with_a_session_each_come_to_the_same() {
    let bundle = bundle();
    let wanted = Session::new(&bundle).unwrap().generate_text(PROMPT, &few(), |_| ControlFlow::Continue(())).unwrap();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let mut session = Session::new(&bundle).unwrap(); // moves to its thread
            thread::spawn(move || {
                let mut told = String::new();
                let out = session.generate_text(PROMPT, &few(), |delta| {
                    told.push_str(delta);
                    ControlFlow::Continue(())
                });
                (told, out.unwrap().text)
            })
        })
        .collect();
    drop(bundle); // the sessions keep the bundle open
    for thread in threads {
        assert_eq!(thread.join().unwrap(), (wanted.text.clone(), wanted.text.clone()));
    }
}

#[test]
fn a_panic_comes_out_of_the_call_and_the_session_goes_on() {
    let mut session = Session::new(&bundle()).unwrap();
    let call = AssertUnwindSafe(|| session.generate_text(PROMPT, &few(), |_| panic!("made to")).map(|_| ()));
    assert_eq!(*catch_unwind(call).unwrap_err().downcast::<&str>().unwrap(), "made to");
    let broken = session.generate_text(PROMPT, &few(), |_| ControlFlow::Break(())).unwrap_err();
    assert!(broken.to_string().starts_with("CANCELLED: "), "{broken}");
    let chat = session.generate_chat(&[("user", PROMPT)], &few(), |_| ControlFlow::Continue(())).unwrap();
    assert!(!chat.text.is_empty());
}

#[test]
fn another_thread_ends_a_request() {
    let bundle = bundle();
    let mut session = Session::new(&bundle).unwrap();
    let canceller = session.canceller();
    let over = std::sync::atomic::AtomicBool::new(false);
    let out = thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                canceller.cancel();
                thread::yield_now();
            }
        });
        let slow = Some(bundle.preset("llada").unwrap());
        let long = Options { policy: slow, max_new_tokens: Some(400), ..Options::default() };
        let out = session.generate_text(PROMPT, &long, |_| ControlFlow::Continue(()));
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        out.unwrap()
    });
    assert_eq!(out.finish, Finish::Cancelled);
    drop(session);
    canceller.cancel(); // the canceller keeps the session's handle alive
}

#[test]
fn what_cannot_be_is_said() {
    assert!(Bundle::open("/no/such/bundle", 1).err().unwrap().to_string().starts_with("NOT_FOUND: /no/such/bundle"));
    let mut session = Session::new(&bundle()).unwrap();
    let refused = session.generate_text(&"go ".repeat(600), &few(), |_| ControlFlow::Continue(())).unwrap_err();
    assert!(refused.sentence.contains("is longer than the denoiser's"), "{refused}");
}

#[test]
fn default_options_generate_as_many_tokens_as_the_bundle_says() {
    let bundle = bundle();
    let said = Options { max_new_tokens: Some(bundle.max_new_tokens()), ..Options::default() };
    let text = alone(&bundle, PROMPT, &Options::default());
    assert!(!text.is_empty());
    assert_eq!(text, alone(&bundle, PROMPT, &said));
    let none = Options { max_new_tokens: Some(0), ..Options::default() };
    let out = Session::new(&bundle).unwrap().generate_text(PROMPT, &none, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((out.passes, out.completion_tokens), (0, 0));
    let exact = Options { new_tokens: 7, ..Options::default() };
    let out = Session::new(&bundle).unwrap().generate_text("", &exact, |_| ControlFlow::Continue(())).unwrap();
    assert!(out.passes > 0 && out.completion_tokens <= 7);
    let refused = Options { new_tokens: 7, ..few() };
    let refused = Session::new(&bundle).unwrap().generate_text("", &refused, |_| ControlFlow::Continue(())).unwrap_err();
    assert!(refused.sentence.contains("both new_tokens = 7 and max_new_tokens = 40"), "{refused}");
}

#[test]
fn presets_effort_levels_and_changed_fields_choose_the_loop() {
    let bundle = bundle();
    let mut session = Session::new(&bundle).unwrap();
    let mut passes = |policy| {
        let options = Options { policy: Some(policy), ..few() };
        session.generate_text(PROMPT, &options, |_| ControlFlow::Continue(())).unwrap().passes
    };
    let fast = bundle.preset("fast-dllm").unwrap();
    let mut changed = fast.clone();
    changed.set("threshold", 1.0).unwrap();
    assert!(passes(fast.clone()) < passes(bundle.preset("llada").unwrap()));
    assert!(passes(fast.clone()) < passes(changed));
    assert!(bundle.preset("slow").unwrap_err().sentence.contains("llada, fast-dllm"));

    let levels = Bundle::open(&given("DLM_EFFORT_BUNDLE"), 1).unwrap();
    assert!(passes(levels.effort("instant").unwrap()) < passes(levels.effort("high").unwrap()));
    assert!(levels.effort("most").is_err());

    let mut draws = fast.clone();
    draws.set_choice("select", "sample").unwrap();
    draws.set("temperature", 1.5).unwrap();
    draws.set("seed", 7.0).unwrap();
    let options = Options { policy: Some(draws.clone()), ..few() };
    assert_eq!(alone(&bundle, "go", &options), alone(&bundle, "go", &options));
    for (name, value) in
        [("threshold", 2.0), ("top_k", 1.5), ("seed", -1.0), ("temperature", f64::NAN), ("select", 1.0), ("x", 1.0)]
    {
        assert!(draws.set(name, value).is_err(), "{name}");
    }
    assert!(draws.set_choice("select", "best").unwrap_err().sentence.contains("is not one of argmax, sample"));
    assert!(draws.set_choice("threshold", "1").is_err());
}

#[test]
fn a_text_ends_before_a_stop_string() {
    let bundle = bundle();
    let stopped = Options { stop_strings: vec!["kitchen".into()], ..few() };
    let whole = alone(&bundle, PROMPT, &few());
    let wanted = &whole[..whole.find("kitchen").unwrap()];
    assert_eq!(alone(&bundle, PROMPT, &stopped), wanted);
    let scheduler = Scheduler::new(&bundle).unwrap();
    let out = scheduler.submit_text(PROMPT, &stopped).unwrap().wait().unwrap();
    assert_eq!((out.text.as_str(), out.finish), (wanted, Finish::Stop));
    let nul = Options { stop_strings: vec!["a\0".into()], ..few() };
    assert!(Session::new(&bundle).unwrap().generate_text(PROMPT, &nul, |_| ControlFlow::Continue(())).is_err());
}

#[test]
fn a_constraint_is_of_its_request_alone() {
    let bundle = bundle();
    let mut session = Session::new(&bundle).unwrap();
    let automaton = Automaton::open(&given("DLM_AUTOMATON")).unwrap();
    let read = Automaton::read(&std::fs::read(given("DLM_AUTOMATON")).unwrap()).unwrap();
    let free = session.generate_text(PROMPT, &few(), |_| ControlFlow::Continue(())).unwrap().text;
    for constraint in [automaton, read] {
        let options = Options { constraint: Some(constraint), ..few() };
        let out = session.generate_text(PROMPT, &options, |_| ControlFlow::Continue(())).unwrap();
        assert!(["yes", "no"].contains(&out.text.as_str()), "{}", out.text);
        assert_eq!(session.generate_text(PROMPT, &few(), |_| ControlFlow::Continue(())).unwrap().text, free);
    }
    assert!(Automaton::open("/no/such/file").unwrap_err().to_string().starts_with("NOT_FOUND: /no/such/file"));
    assert!(Automaton::read(b"DLM").is_err());
}

#[test]
fn a_constraint_is_compiled_for_a_bundle() {
    let bundle = bundle();
    let mut session = Session::new(&bundle).unwrap();
    let contents = [
        Content::Regex("yes|no"),
        Content::Enum("[\"yes\", \"no\"]"),
        Content::Grammar("root ::= \"yes\" | \"no\""),
        Content::Tree("{\"either\": [{\"text\": \"yes\"}, {\"regex\": \"no\"}]}"),
    ];
    for content in contents {
        let options = Options { constraint: Some(Automaton::compile(&bundle, content).unwrap()), ..few() };
        let out = session.generate_text(PROMPT, &options, |_| ControlFlow::Continue(())).unwrap();
        assert!(["yes", "no"].contains(&out.text.as_str()), "{content:?}: {}", out.text);
    }
    let schema = Automaton::compile(&bundle, Content::Schema("{\"enum\": [\"yes\", \"no\"]}")).unwrap();
    let options = Options { constraint: Some(schema), ..few() };
    assert!(["\"yes\"", "\"no\""].contains(&alone(&bundle, PROMPT, &options).as_str()));
    assert!(Automaton::compile(&bundle, Content::JsonObject).is_ok());
    let decision = Content::Decisions("{\"parts\": [[\"yes\", \"no\"]], \"is_open\": false}");
    let options = Options { constraint: Some(Automaton::compile(&bundle, decision).unwrap()), ..few() };
    let probs = session.generate_text(PROMPT, &options, |_| ControlFlow::Continue(())).unwrap().option_probs;
    assert_eq!(probs.len(), 2);
    assert!((probs.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{probs:?}");
    let wrong = Automaton::compile(&bundle, Content::Grammar("root ::= x")).unwrap_err();
    assert!(wrong.sentence.contains("line 1, column 10: rule 'x' is not defined"), "{wrong}");
}

#[test]
fn requests_of_a_scheduler_come_to_what_each_comes_to_alone() {
    let bundle = bundle();
    let constrained = Options { constraint: Some(Automaton::open(&given("DLM_AUTOMATON")).unwrap()), ..Options::default() };
    let fast = Options { policy: Some(bundle.preset("fast-dllm").unwrap()), ..few() };
    let requests: Vec<_> =
        ["play jazz", PROMPT, "go"].iter().flat_map(|prompt| [(prompt, &constrained), (prompt, &fast)]).collect();
    let scheduler = Scheduler::new(&bundle).unwrap();
    let jobs: Vec<_> = requests.iter().map(|(prompt, options)| scheduler.submit_text(prompt, options).unwrap()).collect();
    let chat = scheduler.submit_chat(&[("user", PROMPT)], &few()).unwrap();
    for (job, (prompt, options)) in jobs.into_iter().zip(&requests) {
        let out = thread::spawn(move || job.wait().unwrap()).join().unwrap(); // a job moves to another thread
        assert_eq!(out.text, alone(&bundle, prompt, options));
    }
    let mut session = Session::new(&bundle).unwrap();
    let answer = session.generate_chat(&[("user", PROMPT)], &few(), |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(chat.wait().unwrap().text, answer.text);

    let long = Options { max_new_tokens: Some(400), policy: Some(bundle.preset("llada").unwrap()), ..Options::default() };
    let ended = scheduler.submit_text(PROMPT, &long).unwrap();
    ended.cancel();
    assert_eq!(ended.wait().unwrap().finish, Finish::Cancelled);
    let refused = scheduler.submit_text(&"go ".repeat(600), &few());
    assert!(refused.err().unwrap().sentence.contains("is longer than the denoiser's"));
    let left = scheduler.submit_text(PROMPT, &long).unwrap();
    drop(scheduler.submit_text(PROMPT, &long).unwrap());
    drop((scheduler, bundle));
    assert_eq!(left.wait().unwrap().finish, Finish::Cancelled);
}
