// Package dlm wraps libdlm_runtime, which generates text from bundles of dlm-export.
//
// Open a Bundle once and share it between goroutines. Each goroutine generates with a Session of
// its own. To run many requests at the same time, submit them to a Scheduler, which runs them in
// shared passes. Options sets the length, the Policy and the constraint (Automaton) of a request.
//
// The program must close each object that it creates. Close a Bundle after all objects that use it.
package dlm

/*
#cgo pkg-config: dlm_runtime
#include <stdlib.h>
#include "dlm_runtime.h"

int32_t dlmGoOnText(uintptr_t user, char *text, size_t size); // in callback.go

static int32_t on_step(void *user, const dlm_step *step) {
  return step->text_size == 0 ? 0 : dlmGoOnText((uintptr_t)user, (char *)step->text, step->text_size);
}

// Go cannot take the address of on_step, and cannot convert a cgo.Handle to a pointer. So this
// function does both.
static void tell_steps(dlm_request *request, uintptr_t user) {
  request->text = DLM_TEXT_STEPS;
  request->on_step = on_step;
  request->user = (void *)user;
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

// Error says why a call failed.
type Error struct {
	Status   int    // the dlm_status of dlm_runtime.h, such as 2 for DLM_NOT_FOUND
	Sentence string // the error message
}

// Error returns the name of the status, followed by the error message.
func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s", C.GoString(C.dlm_status_name(C.dlm_status(e.Status))), e.Sentence)
}

// check calls a C function that writes an error message to a buffer.
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

// Open opens the bundle in a folder, checks the hashes of the bundle's files, and loads ONNX
// Runtime. threads is the number of threads that ONNX Runtime uses. 0 means one thread per core.
func Open(path string, threads int) (*Bundle, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	options := (*C.dlm_open_options)(C.calloc(1, C.sizeof_dlm_open_options))
	defer C.free(unsafe.Pointer(options))
	C.dlm_open_options_init(options, C.sizeof_dlm_open_options)
	options.threads = C.int32_t(threads)
	b := &Bundle{}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_bundle_open(name, options, message, capacity, &b.handle)
	}); err != nil {
		return nil, err
	}
	return b, nil
}

// Close frees the bundle. Close the bundle's sessions, schedulers and jobs first.
func (b *Bundle) Close() {
	C.dlm_bundle_destroy(b.handle)
	b.handle = nil
}

// Engine returns one line of text that describes the bundle's engine.
func (b *Bundle) Engine() string { return C.GoString(C.dlm_bundle_describe(b.handle).engine) }

// MaxNewTokens returns the largest number of new tokens of a request whose Options do not set
// MaxNewTokens.
func (b *Bundle) MaxNewTokens() int {
	return int(C.dlm_bundle_describe(b.handle).denoiser.max_new_tokens)
}

// Session generates one request at a time.
type Session struct{ handle *C.dlm_session }

// NewSession creates a session of the bundle. Close the session before the bundle.
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

// NoNewTokens is a value of Options.MaxNewTokens, with which a request generates no tokens after
// the prompt.
const NoNewTokens = -1

// Options are the options of a request. The zero value selects the bundle's default length and
// default preset.
type Options struct {
	MaxNewTokens int        // largest number of tokens to generate; 0: Bundle.MaxNewTokens
	NewTokens    int        // exact number of mask tokens to add and fill, instead of MaxNewTokens; 0: MaxNewTokens applies
	Policy       *Policy    // nil: the bundle's default preset
	Constraint   *Automaton // nil: any text is allowed
	StopStrings  []string   // the text ends before the first stop string
	DeadlineMs   float64    // milliseconds after which no pass starts; 0: no deadline
	MaxSteps     int        // largest number of passes; 0: no limit
	// If SpecialTokens is true, the text of a special token in the prompt or in a message, such as
	// <|eos|>, is encoded as this token. If it is false, the text is encoded as ordinary text.
	SpecialTokens bool
	OnText        func(delta string) bool // for sessions only: receives the text that each step adds; false ends the request with an error
}

// raw copies the options, and the data that the options point to, to C memory. The function `free`
// frees this memory.
func (o *Options) raw() (request *C.dlm_request, free func()) {
	request = (*C.dlm_request)(C.calloc(1, C.sizeof_dlm_request))
	C.dlm_request_init(request, C.sizeof_dlm_request)
	request.text = C.DLM_TEXT_RESULT
	if o.MaxNewTokens == NoNewTokens {
		request.max_new_tokens = 0
	} else if o.MaxNewTokens != 0 {
		request.max_new_tokens = C.int32_t(clamp(o.MaxNewTokens))
	}
	request.new_tokens = C.int64_t(o.NewTokens)
	request.deadline_ms = C.double(o.DeadlineMs)
	request.max_steps = C.int32_t(clamp(o.MaxSteps))
	if o.SpecialTokens {
		request.special_tokens = 1
	}
	if o.Policy != nil {
		policy := (*C.dlm_policy)(C.calloc(1, C.sizeof_dlm_policy))
		*policy = o.Policy.fields
		request.policy = policy
	}
	if o.Constraint != nil {
		request.constraint = o.Constraint.handle
	}
	stops := (**C.char)(C.calloc(C.size_t(len(o.StopStrings)+1), C.size_t(unsafe.Sizeof(uintptr(0)))))
	copied := unsafe.Slice(stops, len(o.StopStrings))
	for i, stop := range o.StopStrings {
		copied[i] = C.CString(stop)
	}
	if len(copied) > 0 {
		request.stop_strings, request.stop_count = stops, C.size_t(len(copied))
	}
	return request, func() {
		for _, stop := range copied {
			C.free(unsafe.Pointer(stop))
		}
		C.free(unsafe.Pointer(stops))
		C.free(unsafe.Pointer(request.policy))
		C.free(unsafe.Pointer(request))
	}
}

// A source sets the prompt or the chat of a request. It allocates C memory, which the function
// `free` frees.
type source func(request *C.dlm_request) (free func())

func promptOf(prompt string) source {
	return func(request *C.dlm_request) func() {
		given := C.CString(prompt)
		request.prompt, request.prompt_size = given, C.size_t(len(prompt))
		return func() { C.free(unsafe.Pointer(given)) }
	}
}

func chatOf(chat []Message) source {
	return func(request *C.dlm_request) func() {
		messages, free := newMessages(chat)
		request.messages, request.message_count = messages, C.size_t(len(chat))
		return free
	}
}

// clamp limits a number to the range of int32. If the limited number is too large, the library
// rejects it with an error.
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

// Generation is the result of a request.
type Generation struct {
	Text             string    // the generated text before the first end token
	Finish           string    // "stop", "length", "steps", "deadline", "cancelled", "constraint", or "unknown" for a value of a newer library
	Passes           int       // number of passes of the request
	PromptTokens     int       // number of tokens of the prompt
	CompletionTokens int       // number of tokens generated before the first end token
	OptionProbs      []float64 // for the kind Decisions: the probability of each option of all questions
}

func newGeneration(result *C.dlm_result) *Generation {
	text := C.GoStringN(result.text, C.int(result.text_size))
	names := []string{"none", "stop", "length", "steps", "deadline", "cancelled", "constraint"}
	finish := "unknown"
	if at := int(result.finish); at >= 0 && at < len(names) {
		finish = names[at]
	}
	probs := make([]float64, int(result.option_count))
	for i, prob := range unsafe.Slice(result.option_probs, len(probs)) {
		probs[i] = float64(prob)
	}
	return &Generation{text, finish, int(result.stats.nfe), int(result.prompt_tokens), int(result.completion_tokens), probs}
}

// GenerateText generates the text after a prompt. If ctx is done, the request ends early, and
// GenerateText returns the text so far.
func (s *Session) GenerateText(ctx context.Context, prompt string, options Options) (*Generation, error) {
	return s.generate(ctx, promptOf(prompt), options)
}

// newMessages copies a chat to C memory. The function `free` frees this memory.
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

// GenerateChat generates the assistant's answer to a chat. If ctx is done, the request ends early,
// and GenerateChat returns the text so far.
func (s *Session) GenerateChat(ctx context.Context, chat []Message, options Options) (*Generation, error) {
	return s.generate(ctx, chatOf(chat), options)
}

func (s *Session) generate(ctx context.Context, given source, options Options) (*Generation, error) {
	request, free := options.raw()
	defer free()
	defer given(request)()
	heard := &listener{onText: options.OnText}
	handle := cgo.NewHandle(heard)
	defer handle.Delete()
	if options.OnText != nil {
		C.tell_steps(request, C.uintptr_t(handle))
	}
	defer s.cancelWith(ctx)()
	var result *C.dlm_result
	status := C.dlm_session_generate(s.handle, request, &result)
	if heard.panicked != nil {
		panic(heard.panicked)
	}
	if status != C.DLM_OK {
		return nil, &Error{int(status), C.GoString(C.dlm_session_last_error(s.handle))}
	}
	return newGeneration(result), nil
}

// cancelWith starts a goroutine that cancels the session's request when ctx is done. The returned
// function ends this goroutine and waits until it has ended.
func (s *Session) cancelWith(ctx context.Context) func() {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-over:
			return
		case <-ctx.Done():
		}
		for { // repeated, because cancelling has no effect before the request has begun
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
