package dlm

/*
#include <stdlib.h>
#include "dlm_runtime.h"

static const char *choice_at(const dlm_policy_field *field, size_t index) { return field->choices[index]; }
*/
import "C"

import (
	"fmt"
	"math"
	"strings"
	"unsafe"
)

// Policy decides which tokens are committed after each pass. A Policy starts as a preset or an
// effort level of a bundle, and the program can change its fields. They are documented at
// dlm_policy in dlm_runtime.h. Do not use a Policy after its bundle was closed.
type Policy struct{ fields C.dlm_policy }

// Preset returns the bundle's preset with this name, for example "fast-dllm". If the name is
// unknown, the error lists all names.
func (b *Bundle) Preset(name string) (*Policy, error) {
	return b.policy(name, "")
}

// Effort returns the policy of an effort level: "instant", "low", "medium" or "high". Effort fails
// if the bundle contains no effort levels. `dlm-export effort` adds effort levels to a bundle.
func (b *Bundle) Effort(level string) (*Policy, error) {
	return b.policy("", level)
}

func (b *Bundle) policy(preset, effort string) (*Policy, error) {
	names := [2]*C.char{}
	for i, name := range []string{preset, effort} {
		if name != "" {
			names[i] = C.CString(name)
			defer C.free(unsafe.Pointer(names[i]))
		}
	}
	p := &Policy{}
	C.dlm_policy_init(&p.fields, C.sizeof_dlm_policy)
	if err := check(func(message *C.char, capacity C.size_t) C.dlm_status {
		return C.dlm_bundle_policy(b.handle, names[0], names[1], message, capacity, &p.fields)
	}); err != nil {
		return nil, err
	}
	return p, nil
}

// Set changes a numeric field, for example ("temperature", 0.7). The library checks the policy as a
// whole when a request starts.
func (p *Policy) Set(name string, value float64) error {
	field, err := fieldOf(name)
	if err != nil {
		return err
	}
	if field.kind == C.DLM_FIELD_CHOICE {
		return invalid("policy: %s is a text: use SetChoice", name)
	}
	// As a float64, the highest seed 2^64 - 1 is rounded up to 2^64, which does not fit a uint64.
	isTooLarge := field.kind == C.DLM_FIELD_UINT64 && value >= math.MaxUint64
	isWhole := field.kind == C.DLM_FIELD_DOUBLE || value == math.Trunc(value)
	if !isWhole || isTooLarge || !(value >= float64(field.lowest) && value <= float64(field.highest)) {
		return invalid("policy: %s = %v is not a number that this field takes, in %v..%v", name, value, field.lowest, field.highest)
	}
	place := unsafe.Add(unsafe.Pointer(&p.fields), field.offset)
	switch field.kind {
	case C.DLM_FIELD_INT32:
		*(*int32)(place) = int32(value)
	case C.DLM_FIELD_DOUBLE:
		*(*float64)(place) = value
	default:
		*(*uint64)(place) = uint64(value)
	}
	return nil
}

// SetChoice changes a field whose value is a string, for example ("select", "sample").
func (p *Policy) SetChoice(name, value string) error {
	field, err := fieldOf(name)
	if err != nil {
		return err
	}
	if field.kind != C.DLM_FIELD_CHOICE {
		return invalid("policy: %s is a number: use Set", name)
	}
	var known []string
	for i := C.size_t(0); ; i++ {
		choice := C.choice_at(field, i)
		if choice == nil {
			return invalid("policy: %s = %q is not one of %s", name, value, strings.Join(known, ", "))
		}
		if C.GoString(choice) == value {
			*(**C.char)(unsafe.Add(unsafe.Pointer(&p.fields), field.offset)) = choice
			return nil
		}
		known = append(known, C.GoString(choice))
	}
}

func fieldOf(name string) (*C.dlm_policy_field, error) {
	for i := C.size_t(0); ; i++ {
		field := C.dlm_policy_field_at(i)
		if field == nil {
			return nil, invalid("policy: there is no field %q", name)
		}
		if C.GoString(field.name) == name && field.offset < C.sizeof_dlm_policy {
			return field, nil
		}
	}
}

func invalid(format string, values ...any) error {
	return &Error{C.DLM_INVALID_ARGUMENT, fmt.Sprintf(format, values...)}
}
