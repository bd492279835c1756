// A pointer to an array, and the array's length. A View does not own the array.
#pragma once

#include <cstddef>

namespace dlm {

template <class T>
struct View {
  const T* data = nullptr;
  size_t size = 0;
  const T& operator[](size_t i) const { return data[i]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
};

}  // namespace dlm
