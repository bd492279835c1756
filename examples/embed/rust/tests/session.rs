//! What the wrapper promises of threads, panics and callbacks, on the bundle that `$DLM_BUNDLE` names.

use std::ops::ControlFlow;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::thread;

use dlm_runtime::{Bundle, Finish, Options, Session};

const PROMPT: &str = "turn on the kitchen lights";

fn bundle() -> Bundle {
    Bundle::open(&std::env::var("DLM_BUNDLE").expect("DLM_BUNDLE names a bundle"), 1).unwrap()
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
    drop(bundle); // sessions keep it open
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
    let mut session = Session::new(&bundle()).unwrap();
    let canceller = session.canceller();
    let over = std::sync::atomic::AtomicBool::new(false);
    let out = thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                canceller.cancel();
                thread::yield_now();
            }
        });
        let long = Options { max_new_tokens: Some(400), ..Options::default() };
        let out = session.generate_text(PROMPT, &long, |_| ControlFlow::Continue(()));
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        out.unwrap()
    });
    assert_eq!(out.finish, Finish::Cancelled);
    drop(session);
    canceller.cancel(); // it keeps what it cancels
}

#[test]
fn what_cannot_be_is_said() {
    assert!(Bundle::open("/no/such/bundle", 1).err().unwrap().to_string().starts_with("NOT_FOUND: /no/such/bundle"));
    let mut session = Session::new(&bundle()).unwrap();
    let long = Options { max_new_tokens: Some(1 << 30), ..Options::default() };
    let refused = session.generate_text(PROMPT, &long, |_| ControlFlow::Continue(())).unwrap_err();
    assert!(refused.sentence.contains("is longer than the denoiser's"), "{refused}");
}
