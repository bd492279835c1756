// Code that the fuzz targets share: a check that ends the program if it fails, a reader for the
// bytes of an input, and a mutator for files of int32 numbers.
//
// A target is one source file that defines LLVMFuzzerTestOneInput. With clang, it is linked with
// libFuzzer. With other compilers, it is linked with replay.cc, which runs it on existing files.
// docs/guides/developing.md explains how to run the targets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>

#include "dlm_runtime.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);  // defined by
                                                                                  // libFuzzer

namespace fuzz {

inline void claim(bool holds, const char* what, int line) {
  if (holds) return;
  std::fprintf(stderr, "line %d: %s does not hold\n", line, what);
  std::abort();
}
#define CLAIM(condition) fuzz::claim((condition), #condition, __LINE__)

// Returns true if a message is one line of printable text that is not empty.
inline bool is_sentence(std::string_view text) {
  if (text.empty()) return false;
  for (const char c : text)
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7F) return false;
  return true;
}

// Returns true for a status that invalid input may cause. Returns false for DLM_INTERNAL, because
// this status always means a defect.
inline bool is_refusal(dlm_status status) {
  return status > DLM_OK && status <= DLM_BUSY && status != DLM_INTERNAL;
}

// The bytes of the fuzz input, read from start to end. After the end, all bytes are zero.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  bool is_empty() const { return left_ == 0; }
  uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  std::string_view text(size_t size) {
    size = size < left_ ? size : left_;
    const std::string_view found(reinterpret_cast<const char*>(data_), size);
    data_ += size, left_ -= size;
    return found;
  }
  std::string_view rest() { return text(left_); }

  template <class Value, size_t count>
  const Value& pick(const Value (&values)[count]) {
    return values[byte() % count];
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

// Mutates a file of little-endian int32 numbers. The numbers start at offset `first`. Most
// mutations change one number, so that the sizes in the file's header stay right. The other
// mutations call libFuzzer's own mutator.
inline size_t mutate_numbers(uint8_t* data, size_t size, size_t max_size, size_t first,
                             unsigned seed) {
  static constexpr int32_t kEdges[] = {
      -1, 0, 1, 2, 3, 255, 256, 0xD800, 0x10FFFF, 0x110000, 1 << 24, 1 << 30, INT32_MAX, INT32_MIN};
  const size_t numbers = size > first ? (size - first) / 4 : 0;
  if (numbers == 0 || seed % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
  auto draw = [state = uint64_t{seed} * 0x9E3779B97F4A7C15u + 1](size_t below) mutable {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>(state >> 33) % below;
  };
  for (size_t times = 1 + draw(3); times-- > 0;) {
    uint8_t* const at = data + first + 4 * draw(numbers);
    int32_t value;
    std::memcpy(&value, at, 4);
    switch (draw(4)) {
      case 0:
        value = kEdges[draw(std::size(kEdges))];
        break;
      case 1:
        value =
            static_cast<int32_t>(static_cast<uint32_t>(value) + static_cast<uint32_t>(draw(9)) - 4);
        break;
      case 2:
        std::memcpy(&value, data + first + 4 * draw(numbers), 4);
        break;  // replaces the number with another number of the file
      default:
        value ^= 1 << draw(32);
    }
    std::memcpy(at, &value, 4);
  }
  return size;
}

}  // namespace fuzz
