// Computes SHA-256 hashes (FIPS 180-4). A bundle's manifest lists the hashes of the bundle's files.
//
// Files with weights can be several gigabytes large, so the code uses the processor's SHA
// instructions (SHA-NI of x86-64 or SHA2 of ARMv8). If the processor has no SHA instructions, the
// code uses portable C++, which gives the same results.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace dlm {

class Sha256 {
 public:
  // If `portable` is true, the object uses only portable code. Tests compare the results of the
  // portable code with the results of the fast code.
  explicit Sha256(bool portable = false);
  void update(const void* data, size_t bytes);
  // digest() and hex() return the hash of the data. hex() returns lower-case hex. After a call of
  // digest() or hex(), do not use the object again.
  std::array<uint8_t, 32> digest();
  std::string hex();

  // Returns true if the code uses SHA instructions of this processor.
  static bool is_accelerated();

 private:
  using Compress = void (*)(uint32_t* state, const uint8_t* blocks, size_t count);
  Compress compress_;
  uint32_t state_[8];
  uint8_t pending_[64];
  size_t pending_bytes_ = 0;
  uint64_t total_bytes_ = 0;
};

inline std::string sha256_hex(const std::string& text) {
  Sha256 hash;
  hash.update(text.data(), text.size());
  return hash.hex();
}

// Returns the hash of a file. Throws an Error with status DLM_NOT_FOUND if the file is missing.
// Throws an Error with status DLM_BAD_BUNDLE if the file is not a plain file, or if the file cannot
// be read. Pipes and devices are rejected because a pipe or device might never end.
std::string sha256_file_hex(const std::string& path);

// Returns the hash of an open file, from the current position in the file to the end. Error
// messages contain `path`.
std::string sha256_file_hex(int descriptor, const std::string& path);

}  // namespace dlm
