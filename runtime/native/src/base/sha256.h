// SHA-256 (FIPS 180-4), for the hashes of a bundle's files in its manifest.
//
// Weights can be gigabytes, so it uses the processor's SHA instructions if there are any (x86-64
// SHA-NI, ARMv8 SHA2; found at run time). The portable code gives the same result everywhere else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace dlm {

class Sha256 {
 public:
  // portable: use only the portable code; tests compare it with the fast one.
  explicit Sha256(bool portable = false);
  void update(const void* data, size_t bytes);
  // Ends the message; do not use the object afterwards. hex: lower case.
  std::array<uint8_t, 32> digest();
  std::string hex();

  // True if this processor has SHA instructions that the code uses.
  static bool is_accelerated();

 private:
  using Compress = void (*)(uint32_t* state, const uint8_t* blocks, size_t count);
  Compress compress_;
  uint32_t state_[8];
  uint8_t pending_[64];
  size_t pending_bytes_ = 0;
  uint64_t total_bytes_ = 0;
};

// The hash of a text.
inline std::string sha256_hex(const std::string& text) {
  Sha256 hash;
  hash.update(text.data(), text.size());
  return hash.hex();
}

// The hash of a file. Throws Error(DLM_NOT_FOUND) if it is missing, and Error(DLM_BAD_BUNDLE) if it
// cannot be read or is not a plain file (reading a pipe or device might never end).
std::string sha256_file_hex(const std::string& path);

// The same for an open file, from its current position. `path` is for messages.
std::string sha256_file_hex(int descriptor, const std::string& path);

}  // namespace dlm
