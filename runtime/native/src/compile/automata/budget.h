// Defines Limits, which limits the time, memory and size of compiling one constraint. Defines
// Budget, which checks these limits.
#pragma once

#include <time.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace dlm::compile {

// Thrown if the automaton of a constraint needs more states, edges or memory than the limits allow.
class TooLarge : public Error {
 public:
  explicit TooLarge(const std::string& message) : Error(DLM_INVALID_ARGUMENT, message) {}
};

struct Limits {
  double seconds = 30;                      // limit for the processor time of the whole compilation
  size_t memory_bytes = size_t{192} << 20;  // limit for the memory that each stage uses
  size_t states = size_t{1} << 17;          // limit for the number of states
  size_t edges = size_t{1} << 22;           // limit for the number of edges
};

// Checks the limits while a constraint is compiled. A Budget measures the processor time of the
// thread that creates the Budget, so only this thread may use the Budget. Call check() in every
// loop whose length grows with the constraint. A call takes about a nanosecond, because only every
// 4,096th call reads the clock.
class Budget {
 public:
  // Each error message starts with `what`, the kind of constraint.
  Budget(const Limits& limits, const char* what)
      : limits_(limits), what_(what), end_(now() + limits.seconds) {}

  const Limits& limits() const { return limits_; }

  void check() {
    if ((++calls_ & 0xFFF) == 0) check_time();
  }
  void check_time() const {
    if (now() >= end_)
      fail(DLM_INVALID_ARGUMENT,
           "%s: compiling it takes more than %g s of processor time: make counts smaller, or "
           "raise limits",
           what_, limits_.seconds);
  }
  void check_states(size_t states) {
    if (states > limits_.states)
      throw TooLarge(std::string(what_) + ": its automaton has more than " +
                     std::to_string(limits_.states) +
                     " states: make counts smaller, or raise limits");
  }
  void check_edges(size_t edges) {
    if (edges > limits_.edges)
      throw TooLarge(std::string(what_) + ": its tokens make " + std::to_string(edges) +
                     " edges or more, and " + std::to_string(limits_.edges) +
                     " are the limit: make counts smaller, or raise limits");
  }
  void check_memory(size_t bytes) {
    if (bytes > limits_.memory_bytes)
      throw TooLarge(std::string(what_) + ": compiling it needs more than memory_bytes, " +
                     std::to_string(limits_.memory_bytes >> 20) +
                     " MiB: make counts smaller, or raise it");
  }

 private:
  static double now() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  const Limits limits_;
  const char* const what_;
  const double end_;
  uint32_t calls_ = 0;
};

}  // namespace dlm::compile
