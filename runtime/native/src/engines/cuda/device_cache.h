// Keys and values on a CUDA device. They are stored in two parts: `past` contains the rows that
// passes read, and `present` contains the rows that the last pass wrote.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engines/cuda/cuda_api.h"
#include "engines/engine.h"

namespace dlm {

// Lays out several parts in one allocation. `bytes` contains the sizes of the parts. Returns the
// offset of each part, and then the size of the allocation. TensorRT requires that offsets are
// multiples of 256 bytes, and that all tensors have different addresses, even empty tensors.
inline std::vector<size_t> lay_out(const std::vector<size_t>& bytes) {
  std::vector<size_t> offsets = {0};
  for (const size_t part : bytes)
    offsets.push_back(offsets.back() + (std::max<size_t>(part, 1) + 255) / 256 * 256);
  return offsets;
}

class DeviceCache {
 public:
  // The addresses of one tensor of keys or values in `past` and in `present`. In `past`, the tensor
  // has the shape [B, kv_heads, S, head_size], for B requests and S cached tokens. In `present`, it
  // has the shape [B, kv_heads, T, head_size], for T new tokens. Both `past` and `present` have
  // room for S + T rows of each head.
  struct Place {
    CUdeviceptr past, present;
  };

  DeviceCache(const Cuda& cuda, const CacheShape& shape) : cuda_(cuda), shape_(shape) {}

  // Sets the memory of all tensors: the keys and values of layer 0, then the keys and values of
  // layer 1, and so on. Drops all cached rows.
  void place(std::vector<Place> places);

  // Like place(), but queues copies of the cached rows to the new memory on the stream.
  void move(std::vector<Place> places, CUstream stream);
  const std::vector<Place>& places() const { return places_; }

  // Call begin() before each pass, and end() after each pass. If the pass throws, do not call
  // end(). `use` is the argument of Context::run.
  void begin(const dlm_pass& pass, CacheUse use);
  void end(const dlm_pass& pass, CacheUse use);

  // Implements Context::keep_outside. Queues the copies on the stream, and does not wait for them.
  // Rows stay in the order of their positions.
  //
  // First, the function copies all of `past` to the memory after the rows of `present`. Then it
  // copies the selected rows back to `past`, with the new number of rows per head. This takes a few
  // copies per tensor. The cache in host memory moves only the rows that must change their place
  // (cache/slots.h). On a device, that method would need several copies per head. In total, these
  // are thousands of copies that take some microseconds each.
  void keep_outside(int32_t first, int32_t last, CUstream stream);

  // Returns the number of bytes that `past` and `present` use now.
  uint64_t bytes() const;

 private:
  struct Range {
    int32_t first, last;
    int32_t tokens() const { return last - first; }
  };

  void copy_rows(CUdeviceptr from, int32_t from_rows, CUdeviceptr to, int32_t to_rows, int32_t rows,
                 size_t heads, size_t row, CUstream stream) const;
  void move_rows(int32_t first, int32_t last, const CacheLayer& layer, const Place& place,
                 CUstream stream);

  const Cuda& cuda_;
  const CacheShape& shape_;
  std::vector<Place> places_;
  int32_t batch_ = 1;
  int32_t kept_ = 0;                  // number of rows per head in `past`; their positions are
                                      // outside hole_
  Range hole_{0, 0}, written_{0, 0};  // positions of the rows in `present`
};

// Opens a context whose cache is in device memory. All other arrays of a pass are in host memory.
// The engine must outlive the context. engine.run() must not return before the device has completed
// the pass. `longest` is the argument of Engine::open_context.
std::unique_ptr<Context> open_device_context(HostEngine& engine, const CudaDevice& device,
                                             const CacheShape& shape, int32_t longest);

}  // namespace dlm
