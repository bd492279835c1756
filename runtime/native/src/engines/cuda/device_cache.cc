#include "engines/cuda/device_cache.h"

#include <utility>

#include "base/error.h"

namespace dlm {

void DeviceCache::place(std::vector<Place> places) {
  places_ = std::move(places);
  kept_ = 0;
  hole_ = written_ = {0, 0};
}

void DeviceCache::move(std::vector<Place> places, CUstream stream) {
  for (size_t i = 0; i < places.size(); ++i) {
    const CacheLayer& layer = shape_[i / 2];
    const size_t heads = static_cast<size_t>(batch_) * layer.kv_heads;
    copy_rows(places_[i].past, kept_, places[i].past, kept_, kept_, heads, layer.row_bytes(),
              stream);
  }
  places_ = std::move(places);
  written_ = {0, 0};
}

void DeviceCache::begin(const dlm_pass& pass, CacheUse use) {
  const bool is_first = use == CacheUse::write || (use == CacheUse::append && pass.cached == 0);
  if (is_first) kept_ = 0;
  written_ = {0, 0};
}

void DeviceCache::end(const dlm_pass& pass, CacheUse use) {
  if (!keeps_rows(use)) return;
  // The positions of drafted rows are moved. Only passes that append rows have drafted rows.
  const auto first =
      use == CacheUse::append ? pass.cached : static_cast<int32_t>(pass.position_ids[0]);
  batch_ = pass.batch;
  written_ = hole_ = {first, first + pass.tokens};
}

void DeviceCache::keep_outside(int32_t first, int32_t last, CUstream stream) {
  const int32_t length = kept_ + hole_.tokens();
  first = std::min(first, length);
  last = std::min(last, length);
  // If the last call had the same range, `past` already contains exactly the selected rows.
  if (first == hole_.first && last == hole_.last) return;
  const bool is_filled = written_.first == hole_.first && written_.last == hole_.last;
  if (!is_filled && (first > hole_.first || last < hole_.last))
    fail(DLM_INTERNAL, "cannot keep the rows outside %d..%d: those of %d..%d are gone", first, last,
         hole_.first, hole_.last);
  for (size_t i = 0; i < places_.size(); ++i)
    move_rows(first, last, shape_[i / 2], places_[i], stream);
  kept_ = length - (last - first);
  hole_ = {first, last};
  written_ = {0, 0};
}

uint64_t DeviceCache::bytes() const {
  uint64_t bytes = 0;
  for (const CacheLayer& layer : shape_)
    bytes += 2 * (layer.tensor_bytes(batch_, kept_ + hole_.tokens()) +
                  layer.tensor_bytes(batch_, kept_));
  return bytes;
}

// Copies `rows` rows of each head. A row is `row` bytes long. The source has room for from_rows
// rows per head, and the target has room for to_rows rows per head.
void DeviceCache::copy_rows(CUdeviceptr from, int32_t from_rows, CUdeviceptr to, int32_t to_rows,
                            int32_t rows, size_t heads, size_t row, CUstream stream) const {
  if (rows <= 0) return;
  copy_parts(cuda_, from, from_rows * row, to, to_rows * row, rows * row, heads, stream);
}

// Does the work of keep_outside for one tensor.
void DeviceCache::move_rows(int32_t first, int32_t last, const CacheLayer& layer,
                            const Place& place, CUstream stream) {
  const auto& [past, present] = place;
  const int32_t length = kept_ + hole_.tokens(), kept = length - (last - first);
  const size_t row = layer.row_bytes();
  const size_t heads = static_cast<size_t>(batch_) * layer.kv_heads;
  // First copy the rows of `past` to the memory after the rows of `present`, which has room for
  // them.
  const size_t staged = layer.tensor_bytes(batch_, written_.tokens());
  const auto copy = [&](CUdeviceptr from, int32_t from_rows, CUdeviceptr to, int32_t to_rows,
                        int32_t rows) {
    copy_rows(from, from_rows, to, to_rows, rows, heads, row, stream);
  };
  copy(past, kept_, present + staged, kept_, kept_);
  // Copies the rows of positions `low` to `high` - 1, but not those of positions `first` to `last`
  // - 1. The first row in `from` belongs to position `at`.
  const auto take = [&, past = past](CUdeviceptr from, int32_t from_rows, int32_t at, int32_t low,
                                     int32_t high) {
    const auto part = [&](int32_t begin, int32_t end, int32_t to) {
      copy(from + (begin - at) * row, from_rows, past + (begin - to) * row, kept, end - begin);
    };
    part(low, std::min(high, first), 0);
    part(std::max(low, last), high, last - first);
  };
  take(present + staged, kept_, 0, 0, hole_.first);
  take(present, written_.tokens(), hole_.first, hole_.first, hole_.last);
  take(present + staged, kept_, hole_.tokens(), hole_.last, length);
}

}  // namespace dlm
