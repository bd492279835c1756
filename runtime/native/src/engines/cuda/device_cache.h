// Keys and values on a CUDA device: kept rows (past) and the rows of the last pass (present).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engines/cuda/cuda_api.h"
#include "engines/engine.h"

namespace dlm {

// Offsets of parts of these sizes in one allocation; the last element is its size. TensorRT
// requires multiples of 256 bytes, and distinct addresses even for empty tensors.
inline std::vector<size_t> lay_out(const std::vector<size_t>& bytes) {
  std::vector<size_t> offsets = {0};
  for (const size_t part : bytes)
    offsets.push_back(offsets.back() + (std::max<size_t>(part, 1) + 255) / 256 * 256);
  return offsets;
}

class DeviceCache {
 public:
  // A key or value tensor, [B, kv_heads, S or T, head_size], each with room for S + T rows.
  struct Place {
    CUdeviceptr past, present;
  };

  DeviceCache(const Cuda& cuda, const CacheShape& shape) : cuda_(cuda), shape_(shape) {}

  // Sets the places of keys and values of layer 0, of layer 1, ... Drops the rows kept so far.
  void place(std::vector<Place> places);

  // The same, but copies the kept rows there, in the order of the stream.
  void move(std::vector<Place> places, CUstream stream);
  const std::vector<Place>& places() const { return places_; }

  // Call them around a pass, which may throw in between. `use` is Context::run's.
  void begin(const dlm_pass& pass, CacheUse use);
  void end(const dlm_pass& pass, CacheUse use);

  // Context::keep_outside, in the order of the stream, without waiting. Rows stay in the order of
  // their positions: all of past is copied behind present's rows, then back with its new number of
  // rows per head, in a few copies per tensor. Moving only the rows that change, as in host memory,
  // would take thousands of copies (some per head), at microseconds each.
  void keep_outside(int32_t first, int32_t last, CUstream stream);

  // Current bytes of keys and values, past and present.
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
  int32_t kept_ = 0;                  // rows per head in past, for all positions outside hole_
  Range hole_{0, 0}, written_{0, 0};  // written_: the positions of present's rows
};

// A context of the engine, which must outlive it; `longest` is Engine::open_context's. Everything
// else in a pass is in host memory. The engine's `run` must return only when the pass is complete.
std::unique_ptr<Context> open_device_context(HostEngine& engine, const CudaDevice& device,
                                             const CacheShape& shape, int32_t longest);

}  // namespace dlm
