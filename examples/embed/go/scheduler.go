package dlm

/*
#include <stdlib.h>
#include "dlm_runtime.h"

static dlm_status result_of_job(const dlm_job *job, dlm_result *result) { return dlm_job_result(job, result); }
*/
import "C"

import (
	"context"
	"unsafe"
)

// Scheduler runs requests of any number of goroutines in passes that they share, on a thread that it starts.
type Scheduler struct {
	handle *C.dlm_scheduler
	bundle *Bundle
	ended  chan struct{}
}

// NewScheduler creates a scheduler with the default limits of dlm_scheduler_options, and starts its thread.
func (b *Bundle) NewScheduler() (*Scheduler, error) {
	s := &Scheduler{bundle: b, ended: make(chan struct{})}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_scheduler_create(b.handle, nil, message, capacity, &s.handle)
	}); err != nil {
		return nil, err
	}
	go func() {
		defer close(s.ended)
		// A failure of this call is each job's own failure, which Job.Wait returns.
		C.dlm_scheduler_run(s.handle, 0, nil, nil, nil, 0)
	}()
	return s, nil
}

// Close ends requests that are not done with "cancelled" and frees the scheduler. Its jobs stay until they are closed.
func (s *Scheduler) Close() {
	C.dlm_scheduler_stop(s.handle)
	<-s.ended
	C.dlm_scheduler_destroy(s.handle)
	s.handle = nil
}

// SubmitText hands in a request for the text after a prompt. It fails with DLM_BUSY (status 10) if too many requests wait.
func (s *Scheduler) SubmitText(prompt string, options Options) (*Job, error) {
	tokens, err := s.bundle.encodePrompt(prompt, options.encodeFlags())
	if err != nil {
		return nil, err
	}
	return s.submit(tokens, options)
}

// SubmitChat hands in a request for the assistant's answer to a chat.
func (s *Scheduler) SubmitChat(chat []Message, options Options) (*Job, error) {
	tokens, err := s.bundle.encodeChat(chat, options.encodeFlags())
	if err != nil {
		return nil, err
	}
	return s.submit(tokens, options)
}

func (s *Scheduler) submit(tokens []C.int32_t, options Options) (*Job, error) {
	if options.OnText != nil {
		return nil, invalid("OnText is for sessions: a scheduler's request returns its text as a whole")
	}
	given, automaton, free := options.raw()
	defer free()
	j := &Job{bundle: s.bundle}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_scheduler_submit(s.handle, given, automaton, 0, first(tokens), C.size_t(len(tokens)), message, capacity, &j.handle)
	}); err != nil {
		return nil, err
	}
	return j, nil
}

// Job is a request that was handed to a Scheduler.
type Job struct {
	handle *C.dlm_job
	bundle *Bundle
}

// Wait returns what the request generated, or why it failed. When ctx is done first, the request ends with what it has.
func (j *Job) Wait(ctx context.Context) (*Generation, error) {
	done, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-ctx.Done():
			j.Cancel()
		case <-done:
		}
	}()
	C.dlm_job_wait(j.handle, -1)
	close(done)
	<-watched
	var result C.dlm_result
	if status := C.result_of_job(j.handle, &result); status != C.DLM_OK {
		return nil, &Error{int(status), C.GoString(C.dlm_job_message(j.handle))}
	}
	var length C.size_t
	tokens := unsafe.Slice(C.dlm_job_tokens(j.handle, &length), result.length)
	start := int(result.prompt_tokens)
	text, err := j.bundle.decode(tokens[start : start+int(result.completion_tokens)])
	if err != nil {
		return nil, err
	}
	return newGeneration(text, &result), nil
}

// Cancel ends the request within one pass with what it has. Any goroutine may call it.
func (j *Job) Cancel() { C.dlm_job_cancel(j.handle) }

// Close cancels the request if it is not done, and frees the job. Close it before its bundle.
func (j *Job) Close() {
	C.dlm_job_destroy(j.handle)
	j.handle = nil
}

func (b *Bundle) text() (text *C.dlm_text, err error) {
	err = check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_bundle_text(b.handle, message, capacity, &text)
	})
	return text, err
}

// encodePrompt returns the token ids of a prompt, with the tokens that the tokenizer puts around one.
func (b *Bundle) encodePrompt(text string, flags C.int32_t) ([]C.int32_t, error) {
	known, err := b.text()
	if err != nil {
		return nil, err
	}
	given := C.CString(text)
	defer C.free(unsafe.Pointer(given))
	return filled(func(tokens []C.int32_t, count *C.size_t, message *C.char, capacity C.size_t) C.dlm_status {
		size, room := C.size_t(len(text)), C.size_t(len(tokens))
		return C.dlm_text_encode(known, given, size, C.DLM_ENCODE_PROMPT|flags, message, capacity, first(tokens), room, count)
	})
}

// encodeChat returns the token ids of a chat, up to where the assistant answers.
func (b *Bundle) encodeChat(chat []Message, flags C.int32_t) ([]C.int32_t, error) {
	known, err := b.text()
	if err != nil {
		return nil, err
	}
	messages, free := newMessages(chat)
	defer free()
	return filled(func(tokens []C.int32_t, size *C.size_t, message *C.char, capacity C.size_t) C.dlm_status {
		count, room := C.size_t(len(chat)), C.size_t(len(tokens))
		return C.dlm_chat_encode(known, messages, count, flags, message, capacity, first(tokens), room, size)
	})
}

func (b *Bundle) decode(tokens []C.int32_t) (string, error) {
	known, err := b.text()
	if err != nil {
		return "", err
	}
	text, err := filled(func(text []C.char, size *C.size_t, message *C.char, capacity C.size_t) C.dlm_status {
		count, room := C.size_t(len(tokens)), C.size_t(len(text))
		return C.dlm_text_decode(known, first(tokens), count, message, capacity, first(text), room, size)
	})
	return C.GoStringN(first(text), C.int(len(text))), err
}

// filled calls a C function once for the size of what it writes, and again with room for it.
func filled[T any](call func(out []T, count *C.size_t, message *C.char, capacity C.size_t) C.dlm_status) ([]T, error) {
	var out []T
	for {
		var count C.size_t
		if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
			return call(out, &count, message, capacity)
		}); err != nil {
			return nil, err
		}
		if int(count) <= len(out) {
			return out[:count], nil
		}
		out = make([]T, count)
	}
}

func first[T any](values []T) *T {
	if len(values) == 0 {
		return nil
	}
	return &values[0]
}
