// The memory of an arena: on the host, or on the device that runs the engine.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace dlm {

class RowMemory {
 public:
  virtual ~RowMemory() = default;

  using Block = std::unique_ptr<std::byte, std::function<void(std::byte*)>>;
  // Allocates memory, which may contain any finite numbers. Only this class may access the memory
  // at the returned address. The RowMemory must outlive the block. Throws std::bad_alloc, or an
  // Error with status DLM_OUT_OF_MEMORY.
  virtual Block allocate(size_t bytes) = 0;

  // Copies `count` parts of `bytes` bytes. The parts begin every `from_step` bytes, and are written
  // every `to_step` bytes. Both addresses are in this memory.
  virtual void copy(const std::byte* from, size_t from_step, std::byte* to, size_t to_step,
                    size_t bytes, size_t count) = 0;

  // Copies bytes to host memory, and waits for the result.
  virtual void read(const std::byte* from, std::byte* host, size_t bytes) = 0;
  // Copies bytes from host memory, which must stay as it is until finish() is called.
  virtual void write(const std::byte* host, std::byte* to, size_t bytes) = 0;

  // Waits until all copies are finished. Call finish() before a pass reads the memory.
  virtual void finish() {}
};

std::unique_ptr<RowMemory> make_host_memory();

}  // namespace dlm
