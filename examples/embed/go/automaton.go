package dlm

/*
#include <stdlib.h>
#include "dlm_runtime.h"
*/
import "C"

import "unsafe"

// Automaton holds the texts that a request may generate. `dlm-export compile` writes its file, for the vocabulary of one bundle.
// Any number of goroutines may use one.
type Automaton struct{ handle *C.dlm_automaton }

// OpenAutomaton reads and checks a file.
func OpenAutomaton(path string) (*Automaton, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	a := &Automaton{}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_automaton_open(name, message, capacity, &a.handle)
	}); err != nil {
		return nil, err
	}
	return a, nil
}

// ReadAutomaton reads and checks the content of such a file.
func ReadAutomaton(data []byte) (*Automaton, error) {
	copied := C.CBytes(data)
	defer C.free(copied)
	a := &Automaton{}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_automaton_read(copied, C.size_t(len(data)), message, capacity, &a.handle)
	}); err != nil {
		return nil, err
	}
	return a, nil
}

// Close frees the automaton. Requests that began with it go on.
func (a *Automaton) Close() {
	C.dlm_automaton_destroy(a.handle)
	a.handle = nil
}
