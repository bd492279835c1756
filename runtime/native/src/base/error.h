// The one exception of the core: a status for the C ABI and a sentence for a person.
#pragma once

#include <cxxabi.h>

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "dlm_runtime.h"

namespace dlm {

class Error : public std::runtime_error {
 public:
  Error(dlm_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  dlm_status status() const noexcept { return status_; }

 private:
  dlm_status status_;
};

// pthread_exit() in a callback unwinds the thread's stack with this. A handler for all exceptions
// must throw it on, or the process aborts. CPython up to 3.13 ends the threads so that are in a
// callback as the interpreter exits.
using ThreadExit = abi::__forced_unwind;

// The message for an exception of a callback that does not derive from std::exception.
constexpr char kForeign[] = "a callback threw something that is not a std::exception";

// Throws Error(status, printf-formatted message).
[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(dlm_status status,
                                                                    const char* format, ...) {
  char message[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  throw Error(status, message);
}

}  // namespace dlm
