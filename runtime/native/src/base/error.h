// Defines Error, the type of all exceptions that this library throws. An Error contains a status
// for the C ABI, and a message for people.
#pragma once

#include <cxxabi.h>

#include <cstdarg>
#include <cstdio>
#include <new>
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

// If a callback of the program calls pthread_exit(), the C library unwinds the stack with an
// exception of this type. A handler that catches all exceptions must rethrow an exception of this
// type. Otherwise the process aborts. CPython up to 3.13 calls pthread_exit() when it exits.
using ThreadExit = abi::__forced_unwind;

// The status and the message of a caught exception.
struct Failure {
  dlm_status status;
  std::string message;
};

// Returns the status and the message of the exception that is being handled. If memory runs out
// while this function copies the message, returns DLM_OUT_OF_MEMORY.
inline Failure thrown() noexcept {
  try {
    try {
      throw;
    } catch (const Error& error) {
      return {error.status(), error.what()};
    } catch (const std::bad_alloc&) {
    } catch (const std::exception& error) {
      return {DLM_INTERNAL, error.what()};
    } catch (...) {
      return {DLM_INTERNAL, "a callback threw something that is not a std::exception"};
    }
  } catch (...) {
  }
  // The text is so short that std::string needs no allocation to store the text.
  return {DLM_OUT_OF_MEMORY, "out of memory"};
}

// Throws an Error with the given status. The message is formatted as by printf.
[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(dlm_status status,
                                                                    const char* format, ...) {
  char message[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  throw Error(status, message);
}

inline void check_range(const char* name, int64_t value, int64_t lowest, int64_t highest) {
  if (value < lowest || value > highest)
    fail(DLM_INVALID_ARGUMENT, "%s = %lld is outside %lld..%lld", name,
         static_cast<long long>(value), static_cast<long long>(lowest),
         static_cast<long long>(highest));
}

}  // namespace dlm
