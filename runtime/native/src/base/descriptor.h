// Owns a POSIX file descriptor.
#pragma once

#include <unistd.h>

namespace dlm {

class Descriptor {
 public:
  // `number` is the result of open(), which is negative if open() failed.
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  bool is_open() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  const int number_;
};

}  // namespace dlm
