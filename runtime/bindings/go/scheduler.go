package dlm

// #include "dlm_runtime.h"
import "C"

import "context"

// Scheduler runs the requests of any number of goroutines in shared passes, on a thread of its own.
type Scheduler struct {
	handle *C.dlm_scheduler
	ended  chan struct{}
}

// NewScheduler creates a scheduler with the default limits of dlm_scheduler_options, and starts its
// thread.
func (b *Bundle) NewScheduler() (*Scheduler, error) {
	s := &Scheduler{ended: make(chan struct{})}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_scheduler_create(b.handle, nil, message, capacity, &s.handle)
	}); err != nil {
		return nil, err
	}
	go func() {
		defer close(s.ended)
		// If this call fails, every job fails with the same error, and Job.Wait returns it.
		C.dlm_scheduler_run(s.handle, 0, nil, nil, nil, 0)
	}()
	return s, nil
}

// Close cancels all unfinished requests and frees the scheduler. The scheduler's jobs remain valid
// until they are closed.
func (s *Scheduler) Close() {
	C.dlm_scheduler_stop(s.handle)
	<-s.ended
	C.dlm_scheduler_destroy(s.handle)
	s.handle = nil
}

// SubmitText submits a request that generates the text after a prompt. SubmitText fails with
// DLM_BUSY (status 10) if too many requests are waiting.
func (s *Scheduler) SubmitText(prompt string, options Options) (*Job, error) {
	return s.submit(promptOf(prompt), options)
}

// SubmitChat submits a request that generates the assistant's answer to a chat.
func (s *Scheduler) SubmitChat(chat []Message, options Options) (*Job, error) {
	return s.submit(chatOf(chat), options)
}

func (s *Scheduler) submit(given source, options Options) (*Job, error) {
	if options.OnText != nil {
		return nil, invalid("OnText is for sessions: a scheduler's request returns its text as a whole")
	}
	request, free := options.raw()
	defer free()
	defer given(request)()
	j := &Job{}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_scheduler_submit(s.handle, request, message, capacity, &j.handle)
	}); err != nil {
		return nil, err
	}
	return j, nil
}

// Job is a request that was submitted to a Scheduler.
type Job struct{ handle *C.dlm_job }

// Wait waits until the request has ended, and returns its result, or an error if the request
// failed. If ctx is done before that, Wait ends the request and returns the text so far.
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
	var result *C.dlm_result
	if status := C.dlm_job_result(j.handle, &result); status != C.DLM_OK {
		return nil, &Error{int(status), C.GoString(result.message)}
	}
	return newGeneration(result), nil
}

// Cancel ends the request after at most one more pass. The result contains the text so far. Any
// goroutine may call Cancel.
func (j *Job) Cancel() { C.dlm_job_cancel(j.handle) }

// Close frees the job. If its request is not finished, Close cancels the request. Close a job
// before its bundle.
func (j *Job) Close() {
	C.dlm_job_destroy(j.handle)
	j.handle = nil
}
