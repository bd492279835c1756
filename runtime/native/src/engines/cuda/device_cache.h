// Keys and values on a CUDA device: rows that were kept (past), rows of the last pass (present).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engines/cuda/cuda_api.h"
#include "engines/engine.h"

namespace dlm {

// Offsets of parts of these sizes in one allocation, and its size as the last element. TensorRT
// asks for multiples of 256 bytes, and for separate addresses of empty tensors too.
inline std::vector<size_t> lay_out(const std::vector<size_t>& bytes) {
  std::vector<size_t> offsets = {0};
  for (const size_t part : bytes)
    offsets.push_back(offsets.back() + (std::max<size_t>(part, 1) + 255) / 256 * 256);
  return offsets;
}

class DeviceCache {
 public:
  // A tensor of keys or of values, [B, kv_heads, S or T, head_size], each with room for S + T rows.
  struct Place {
    CUdeviceptr past, present;
  };

  DeviceCache(const Cuda& cuda, const CacheShape& shape) : cuda_(cuda), shape_(shape) {}

  // Keys and values of layer 0, of layer 1, ...; what was kept elsewhere is forgotten.
  void place(std::vector<Place> places);

  // The same with the rows that are kept, which are copied there in the order of the stream.
  void move(std::vector<Place> places, CUstream stream);
  const std::vector<Place>& places() const { return places_; }

  // Around a pass, which may fail in between. `use` is Context::run's.
  void begin(const dlm_pass& pass, CacheUse use);
  void end(const dlm_pass& pass, CacheUse use);

  // Context::keep_outside, in the order of the stream, and nothing to wait for. Rows stay in the
  // order of their positions: the whole of past goes behind present's rows and comes back with its
  // new number of rows a head, in a few copies a tensor. To move only the rows that change, as in
  // host memory, would take some for every head of it: thousands, at microseconds each.
  void keep_outside(int32_t first, int32_t last, CUstream stream);

  // What the keys and values take now, past and present.
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
  int32_t kept_ = 0;                  // rows a head in past: of all positions outside hole_
  Range hole_{0, 0}, written_{0, 0};  // written_: the positions that present's rows are of
};

// A context of the engine, which outlives it; `longest` is Engine::open_context's. All of a pass
// but keys and values is in host memory. The engine's `run` returns when all is done.
std::unique_ptr<Context> open_device_context(HostEngine& engine, const CudaDevice& device,
                                             const CacheShape& shape, int32_t longest);

}  // namespace dlm
