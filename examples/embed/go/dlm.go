// Package dlm wraps libdlm_runtime: a Bundle is opened once, and each goroutine generates with a Session of its own.
//
// A Bundle may be used by any number of goroutines, a Session by one at a time. Both are closed by their owner, sessions first.
package dlm

/*
#cgo pkg-config: dlm_runtime
#include <stdlib.h>
#include "dlm_runtime.h"

int32_t dlmGoOnText(uintptr_t user, char *delta, size_t size); // in callback.go

static int32_t on_text(void *user, const char *delta, size_t size) {
  return dlmGoOnText((uintptr_t)user, (char *)delta, size);
}

// What Go cannot say: macros, and a handle of its own as a pointer.
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
	"runtime/cgo"
	"time"
	"unsafe"
)

// Error is why a call failed: the status of dlm_runtime.h, and a sentence for people.
type Error struct {
	Status   int
	Sentence string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s", C.GoString(C.dlm_status_name(C.dlm_status(e.Status))), e.Sentence)
}

// check calls a function of C with the buffer for its sentence.
func check(call func(message *C.char, capacity C.size_t) C.dlm_status) error {
	const capacity = 1024
	message := (*C.char)(C.calloc(capacity, 1))
	defer C.free(unsafe.Pointer(message))
	if status := call(message, capacity); status != C.DLM_OK {
		return &Error{int(status), C.GoString(message)}
	}
	return nil
}

// Bundle is an opened bundle.
type Bundle struct{ handle *C.dlm_bundle }

// Open opens the folder, checks its hashes, and loads ONNX Runtime with so many threads; 0: all cores.
func Open(path string, threads int) (*Bundle, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	options := (*C.dlm_open_options)(C.calloc(1, C.sizeof_dlm_open_options))
	defer C.free(unsafe.Pointer(options))
	C.init_open_options(options)
	options.threads = C.int32_t(threads)
	b := &Bundle{}
	return b, check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_bundle_open(name, options, message, capacity, &b.handle)
	})
}

// Close closes it, after its sessions.
func (b *Bundle) Close() {
	C.dlm_bundle_destroy(b.handle)
	b.handle = nil
}

// Engine says what runs it, as a line for people.
func (b *Bundle) Engine() string { return C.GoString(C.dlm_bundle_engine(b.handle)) }

// Session generates, for one goroutine at a time.
type Session struct{ handle *C.dlm_session }

func (b *Bundle) NewSession() (*Session, error) {
	s := &Session{}
	return s, check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_session_create(b.handle, message, capacity, &s.handle)
	})
}

// Close frees it.
func (s *Session) Close() {
	C.dlm_session_destroy(s.handle)
	s.handle = nil
}

// Options of a request. Policies are the bundle's default preset's.
type Options struct {
	MaxNewTokens int
	DeadlineMs   float64                 // no pass starts later; 0: no deadline
	MaxSteps     int                     // passes at most; 0: any number
	OnText       func(delta string) bool // told what each step adds; false ends the request with an error. May be nil
}

// Message of a chat.
type Message struct{ Role, Content string }

// Generation is what a request came to.
type Generation struct {
	Text                           string
	Finish                         string // "stop", "length", "steps", "deadline", "cancelled" or "constraint"
	Passes                         int
	PromptTokens, CompletionTokens int
}

type call func(options *C.dlm_generate_options, user C.uintptr_t, text **C.char, size *C.size_t) C.dlm_status

// GenerateText writes what follows a prompt. When ctx is done, the request ends with what it has.
func (s *Session) GenerateText(ctx context.Context, prompt string, options Options) (*Generation, error) {
	given := C.CString(prompt)
	defer C.free(unsafe.Pointer(given))
	return s.generate(ctx, options, func(o *C.dlm_generate_options, user C.uintptr_t, text **C.char, size *C.size_t) C.dlm_status {
		return C.generate_text(s.handle, o, given, C.size_t(len(prompt)), user, text, size)
	})
}

// GenerateChat writes the assistant's answer.
func (s *Session) GenerateChat(ctx context.Context, chat []Message, options Options) (*Generation, error) {
	messages := (*C.dlm_message)(C.calloc(C.size_t(len(chat)+1), C.sizeof_dlm_message))
	defer C.free(unsafe.Pointer(messages))
	for i, message := range chat {
		role, content := C.CString(message.Role), C.CString(message.Content)
		defer C.free(unsafe.Pointer(role))
		defer C.free(unsafe.Pointer(content))
		unsafe.Slice(messages, len(chat))[i] = C.dlm_message{role, content, C.size_t(len(message.Content))}
	}
	return s.generate(ctx, options, func(o *C.dlm_generate_options, user C.uintptr_t, text **C.char, size *C.size_t) C.dlm_status {
		return C.generate_chat(s.handle, o, messages, C.size_t(len(chat)), user, text, size)
	})
}

func (s *Session) generate(ctx context.Context, options Options, run call) (*Generation, error) {
	given := (*C.dlm_generate_options)(C.calloc(1, C.sizeof_dlm_generate_options))
	defer C.free(unsafe.Pointer(given))
	C.init_generate_options(given)
	given.max_new_tokens = C.int32_t(options.MaxNewTokens)
	given.deadline_ms = C.double(options.DeadlineMs)
	given.max_steps = C.int32_t(options.MaxSteps)
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
	out := &Generation{Text: C.GoStringN(text, C.int(size))}
	if status := C.get_result(s.handle, &result); status != C.DLM_OK {
		return nil, s.failure(status)
	}
	names := []string{"none", "stop", "length", "steps", "deadline", "cancelled", "constraint"}
	out.Finish = names[result.finish]
	out.Passes = int(result.nfe)
	out.PromptTokens, out.CompletionTokens = int(result.prompt_tokens), int(result.completion_tokens)
	return out, nil
}

// cancelWith ends the session's request when ctx is done; what it returns ends the watching, and waits for that.
func (s *Session) cancelWith(ctx context.Context) func() {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-over:
			return
		case <-ctx.Done():
		}
		for { // again: a cancel that comes before the request began finds nothing to end
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
