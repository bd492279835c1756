package dlm

/*
#include <stdlib.h>
#include "dlm_runtime.h"
*/
import "C"

// Automaton is a compiled constraint, which defines the texts that a request may generate. It is
// compiled for the vocabulary of one bundle. Any number of goroutines may share it.
type Automaton struct{ handle *C.dlm_automaton }

// Kind says what the content of a constraint is.
type Kind int32

// The kinds of constraints. The content of a Regex is a regular expression in the syntax of Rust's
// regex crate. The content of an Enum is a JSON list of strings. The content of a JSONObject is
// empty. The content of a Tree is JSON as described in docs/guides/c-api.md. The content of a
// Grammar is a context-free grammar in GBNF. The content of Decisions is JSON with questions, as
// described in dlm_runtime.h.
const (
	Regex      Kind = C.DLM_CONSTRAINT_REGEX
	Schema     Kind = C.DLM_CONSTRAINT_SCHEMA
	Enum       Kind = C.DLM_CONSTRAINT_ENUM
	JSONObject Kind = C.DLM_CONSTRAINT_JSON_OBJECT
	Tree       Kind = C.DLM_CONSTRAINT_TREE
	Grammar    Kind = C.DLM_CONSTRAINT_GRAMMAR
	Decisions  Kind = C.DLM_CONSTRAINT_DECISIONS
)

// Compile compiles a constraint for the bundle's vocabulary.
func (b *Bundle) Compile(kind Kind, content string) (*Automaton, error) {
	return compile(b.handle, kind, []byte(content))
}

// OpenAutomaton reads and checks a file that `dlm-export compile` wrote.
func OpenAutomaton(path string) (*Automaton, error) {
	return compile(nil, C.DLM_CONSTRAINT_FILE, []byte(path))
}

// ReadAutomaton reads and checks the content of a file that `dlm-export compile` wrote.
func ReadAutomaton(data []byte) (*Automaton, error) {
	return compile(nil, C.DLM_CONSTRAINT_COMPILED, data)
}

func compile(bundle *C.dlm_bundle, kind Kind, content []byte) (*Automaton, error) {
	copied := C.CBytes(content)
	defer C.free(copied)
	var constraint C.dlm_constraint
	C.dlm_constraint_init(&constraint, C.sizeof_dlm_constraint)
	constraint.kind = C.int32_t(kind)
	constraint.content = (*C.char)(copied)
	constraint.content_size = C.size_t(len(content))
	a := &Automaton{}
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_automaton_compile(bundle, &constraint, message, capacity, &a.handle)
	}); err != nil {
		return nil, err
	}
	return a, nil
}

// Close frees the automaton. Running requests can still use it.
func (a *Automaton) Close() {
	C.dlm_automaton_destroy(a.handle)
	a.handle = nil
}
