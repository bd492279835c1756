#include "cache/row_memory.h"

#include <cstring>

namespace dlm {
namespace {

class HostMemory final : public RowMemory {
 public:
  Block allocate(size_t bytes) override {
    // make_unique would fill all this memory with zeros.
    return {new std::byte[bytes], [](std::byte* memory) { delete[] memory; }};
  }

  void copy(const std::byte* from, size_t from_step, std::byte* to, size_t to_step, size_t bytes,
            size_t count) override {
    for (size_t i = 0; i < count; ++i) std::memcpy(to + i * to_step, from + i * from_step, bytes);
  }

  void read(const std::byte* from, std::byte* host, size_t bytes) override {
    std::memcpy(host, from, bytes);
  }
  void write(const std::byte* host, std::byte* to, size_t bytes) override {
    std::memcpy(to, host, bytes);
  }
};

}  // namespace

std::unique_ptr<RowMemory> make_host_memory() { return std::make_unique<HostMemory>(); }

}  // namespace dlm
