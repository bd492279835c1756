// SHA-256 (FIPS 180-4): the hashes by which a manifest names the files of a bundle.
//
// Weights run to gigabytes, so the processor's own instructions are used where it has them (x86-64
// SHA-NI, ARMv8 SHA2), found at run time; the portable code gives the same result everywhere else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace dlm {

class Sha256 {
 public:
  // portable: keep to the portable code, which tests compare with the fast one.
  explicit Sha256(bool portable = false);
  void update(const void* data, size_t bytes);
  // Ends the message; the object is spent afterwards. hex: in lower case.
  std::array<uint8_t, 32> digest();
  std::string hex();

  // Whether this processor has instructions that we use.
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

// The hash of a file. Error(DLM_NOT_FOUND) if there is no such file, Error(DLM_BAD_BUNDLE) if it
// cannot be read or is not a plain file (a pipe or a device might never end).
std::string sha256_file_hex(const std::string& path);

// The same of an open file, from its current position on. `path` is for messages.
std::string sha256_file_hex(int descriptor, const std::string& path);

}  // namespace dlm
