// Package dlm wraps libdlm_runtime, which generates text from bundles of dlm-export.
//
// Open a Bundle once and share it between goroutines. Each goroutine generates with its own Session. A program with many requests
// at once hands them to a Scheduler, whose requests share passes. Options choose a request's length, Policy and constraint
// (Automaton).
//
// Everything that is opened must be closed, and a Bundle must be closed last.
package dlm

/*
#cgo pkg-config: dlm_runtime
#include <stdlib.h>
#include "dlm_runtime.h"

int32_t dlmGoOnText(uintptr_t user, char *delta, size_t size); // in callback.go

static int32_t on_text(void *user, const char *delta, size_t size) {
  return dlmGoOnText((uintptr_t)user, (char *)delta, size);
}

// Macros, and a cgo.Handle that C takes as a pointer: Go cannot write these.
static void init_open_options(dlm_open_options *options) { dlm_open_options_init(options); }
static void init_generate_options(dlm_generate_options *options) { dlm_generate_options_init(options); }
static dlm_status get_result(dlm_session *session, dlm_result *result) { return dlm_session_result(session, 0, result); }
static dlm_status generate_text(dlm_session *session, const dlm_generate_options *options, const char *prompt,
                                size_t prompt_size, uintptr_t user, const char **text, size_t *size) {
  return dlm_generate_text(session, options, prompt, prompt_size, on_text, (void *)user, text, size);
}
static dlm_status generate_chat(dlm_session *session, const dlm_generate_options *options, const dlm_message *messages,
                                size_t count, uintptr_t user, const char **text, size_t *size) {
  return dlm_generate_chat(session, options, messages, count, on_text, (void *)user, text, size);
}
*/
import "C"

import (
	"context"
	"fmt"
	"math"
	"runtime/cgo"
	"time"
	"unsafe"
)

// Error is why a call failed.
type Error struct {
	Status   int    // the dlm_status of dlm_runtime.h, such as 2 for DLM_NOT_FOUND
	Sentence string // what happened, for people
}

// Error returns the name of the status and the sentence.
func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s", C.GoString(C.dlm_status_name(C.dlm_status(e.Status))), e.Sentence)
}

// check calls a C function that writes its error message to a buffer.
func check(call func(message *C.char, capacity C.size_t) C.dlm_status) error {
	const capacity = 1024
	message := (*C.char)(C.calloc(capacity, 1))
	defer C.free(unsafe.Pointer(message))
	if status := call(message, capacity); status != C.DLM_OK {
		return &Error{int(status), C.GoString(message)}
	}
	return nil
}

// Bundle is an open bundle.
type Bundle struct{ handle *C.dlm_bundle }

// Open opens the bundle in a folder, checks its hashes, and loads ONNX Runtime. threads: how many it uses; 0: all cores.
func Open(path string, threads int) (*Bundle, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	options := (*C.dlm_open_options)(C.calloc(1, C.sizeof_dlm_open_options))
	defer C.free(unsafe.Pointer(options))
	C.init_open_options(options)
	options.threads = C.int32_t(threads)
	b := &Bundle{}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_bundle_open(name, options, message, capacity, &b.handle)
	}); err != nil {
		return nil, err
	}
	return b, nil
}

// Close frees the bundle. Close its sessions, schedulers and jobs first.
func (b *Bundle) Close() {
	C.dlm_bundle_destroy(b.handle)
	b.handle = nil
}

// Engine returns the engine that runs the bundle, as one line for people.
func (b *Bundle) Engine() string { return C.GoString(C.dlm_bundle_engine(b.handle)) }

// MaxNewTokens returns the length of a request whose Options set none.
func (b *Bundle) MaxNewTokens() int { return int(C.dlm_bundle_max_new_tokens(b.handle)) }

// Session generates one request at a time.
type Session struct{ handle *C.dlm_session }

// NewSession creates a session of the bundle. Close it before the bundle.
func (b *Bundle) NewSession() (*Session, error) {
	s := &Session{}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_session_create(b.handle, message, capacity, &s.handle)
	}); err != nil {
		return nil, err
	}
	return s, nil
}

// Close frees the session.
func (s *Session) Close() {
	C.dlm_session_destroy(s.handle)
	s.handle = nil
}

// NoNewTokens is a value of Options.MaxNewTokens: generate nothing after the prompt.
const NoNewTokens = -1

// Options of a request. The zero value takes the bundle's own length and default preset.
type Options struct {
	MaxNewTokens int        // how many tokens to generate at most; 0: the bundle's own number, Bundle.MaxNewTokens
	Policy       *Policy    // the decoding loop; nil: the bundle's default preset
	Constraint   *Automaton // the texts that are allowed; nil: any text
	DeadlineMs   float64    // milliseconds after which no pass starts; 0: no deadline
	MaxSteps     int        // how many passes the request makes at most; 0: any number
	// SpecialTokens makes text of the prompt or of a message that spells a special token, such as <|eos|>, that token. By default
	// it is ordinary text.
	SpecialTokens bool
	OnText        func(delta string) bool // receives the text that each step adds; false ends the request with an error. For sessions
}

// encodeFlags returns the flags of dlm_text_encode and dlm_chat_encode for text of a request.
func (o *Options) encodeFlags() C.int32_t {
	if o.SpecialTokens {
		return C.DLM_ENCODE_SPECIAL
	}
	return 0
}

// raw copies the options to C, with what they point to; free releases both.
func (o *Options) raw() (given *C.dlm_generate_options, automaton *C.dlm_automaton, free func()) {
	given = (*C.dlm_generate_options)(C.calloc(1, C.sizeof_dlm_generate_options))
	C.init_generate_options(given)
	if o.MaxNewTokens == NoNewTokens {
		given.max_new_tokens = 0
	} else if o.MaxNewTokens != 0 {
		given.max_new_tokens = C.int32_t(clamp(o.MaxNewTokens))
	}
	given.deadline_ms = C.double(o.DeadlineMs)
	given.max_steps = C.int32_t(clamp(o.MaxSteps))
	if o.SpecialTokens {
		given.special_tokens = 1
	}
	if o.Policy != nil {
		policy := (*C.dlm_policy)(C.calloc(1, C.sizeof_dlm_policy))
		*policy = o.Policy.fields
		given.policy = policy
	}
	if o.Constraint != nil {
		automaton = o.Constraint.handle
	}
	return given, automaton, func() {
		C.free(unsafe.Pointer(given.policy))
		C.free(unsafe.Pointer(given))
	}
}

// clamp keeps a number within an int32; the library then rejects it with a sentence.
func clamp(number int) int {
	if number > math.MaxInt32 {
		return math.MaxInt32
	}
	if number < math.MinInt32 {
		return math.MinInt32
	}
	return number
}

// Message is one message of a chat.
type Message struct {
	Role    string // "system", "user", "assistant" or "tool": those of the bundle's chat template
	Content string
}

// Generation is what a request generated.
type Generation struct {
	Text             string // without the prompt, up to the first end token
	Finish           string // "stop", "length", "steps", "deadline", "cancelled" or "constraint"; "unknown": of a newer library
	Passes           int    // how many passes the request took part in
	PromptTokens     int    // how many tokens the prompt has
	CompletionTokens int    // how many tokens were generated before the first end token
}

func newGeneration(text string, result *C.dlm_result) *Generation {
	names := []string{"none", "stop", "length", "steps", "deadline", "cancelled", "constraint"}
	finish := "unknown"
	if at := int(result.finish); at >= 0 && at < len(names) {
		finish = names[at]
	}
	return &Generation{text, finish, int(result.nfe), int(result.prompt_tokens), int(result.completion_tokens)}
}

type call func(options *C.dlm_generate_options, user C.uintptr_t, text **C.char, size *C.size_t) C.dlm_status

// GenerateText generates the text after a prompt. When ctx is done, the request ends with what it has.
func (s *Session) GenerateText(ctx context.Context, prompt string, options Options) (*Generation, error) {
	given := C.CString(prompt)
	defer C.free(unsafe.Pointer(given))
	return s.generate(ctx, options, func(o *C.dlm_generate_options, user C.uintptr_t, text **C.char, size *C.size_t) C.dlm_status {
		return C.generate_text(s.handle, o, given, C.size_t(len(prompt)), user, text, size)
	})
}

// newMessages copies a chat to C; free releases it.
func newMessages(chat []Message) (messages *C.dlm_message, free func()) {
	messages = (*C.dlm_message)(C.calloc(C.size_t(len(chat)+1), C.sizeof_dlm_message))
	copied := unsafe.Slice(messages, len(chat))
	for i, message := range chat {
		copied[i] = C.dlm_message{C.CString(message.Role), C.CString(message.Content), C.size_t(len(message.Content))}
	}
	return messages, func() {
		for _, message := range copied {
			C.free(unsafe.Pointer(message.role))
			C.free(unsafe.Pointer(message.content))
		}
		C.free(unsafe.Pointer(messages))
	}
}

// GenerateChat generates the assistant's answer to a chat. When ctx is done, the request ends with what it has.
func (s *Session) GenerateChat(ctx context.Context, chat []Message, options Options) (*Generation, error) {
	messages, free := newMessages(chat)
	defer free()
	return s.generate(ctx, options, func(o *C.dlm_generate_options, user C.uintptr_t, text **C.char, size *C.size_t) C.dlm_status {
		return C.generate_chat(s.handle, o, messages, C.size_t(len(chat)), user, text, size)
	})
}

func (s *Session) generate(ctx context.Context, options Options, run call) (*Generation, error) {
	given, automaton, free := options.raw()
	defer free()
	if status := C.dlm_session_constrain(s.handle, automaton); status != C.DLM_OK {
		return nil, s.failure(status)
	}
	heard := &listener{onText: options.OnText}
	handle := cgo.NewHandle(heard)
	defer handle.Delete()
	defer s.cancelWith(ctx)()
	var text *C.char
	var size C.size_t
	status := run(given, C.uintptr_t(handle), &text, &size)
	if heard.panicked != nil {
		panic(heard.panicked)
	}
	if status != C.DLM_OK {
		return nil, s.failure(status)
	}
	var result C.dlm_result
	if status := C.get_result(s.handle, &result); status != C.DLM_OK {
		return nil, s.failure(status)
	}
	return newGeneration(C.GoStringN(text, C.int(size)), &result), nil
}

// cancelWith ends the session's request when ctx is done, until the returned function is called, which waits for its goroutine.
func (s *Session) cancelWith(ctx context.Context) func() {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-over:
			return
		case <-ctx.Done():
		}
		for { // repeated, because a cancel before the request began has no effect
			C.dlm_session_cancel(s.handle, 0)
			select {
			case <-over:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	return func() {
		close(over)
		<-ended
	}
}

func (s *Session) failure(status C.dlm_status) error {
	return &Error{int(status), C.GoString(C.dlm_session_last_error(s.handle))}
}
