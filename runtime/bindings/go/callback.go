package dlm

// #include <stddef.h>
// #include <stdint.h>
import "C"

import "runtime/cgo"

// listener contains the caller's function. If the function has panicked, listener also contains the
// value of the panic.
type listener struct {
	onText   func(delta string) bool
	panicked any
}

// dlmGoOnText calls the listener's function. A panic must not unwind through C. So dlmGoOnText
// stores the value of a panic and ends the request.
//
//export dlmGoOnText
func dlmGoOnText(user C.uintptr_t, delta *C.char, size C.size_t) (end C.int32_t) {
	heard := cgo.Handle(user).Value().(*listener)
	defer func() {
		if panicked := recover(); panicked != nil {
			heard.panicked, end = panicked, 1
		}
	}()
	if !heard.onText(C.GoStringN(delta, C.int(size))) {
		return 1
	}
	return 0
}
