/* A growing array of bytes. */
#include <stdlib.h>
#include <string.h>

#include "serve.h"

int buffer_append(buffer* to, const char* data, size_t size) {
  if (to->capacity - to->size < size) {
    const size_t wanted = to->size + size, capacity = wanted < 512 ? 512 : wanted + wanted / 2;
    char* const grown = realloc(to->data, capacity);
    if (grown == NULL) return 0;
    to->data = grown;
    to->capacity = capacity;
  }
  if (size > 0) memcpy(to->data + to->size, data, size);
  to->size += size;
  return 1;
}

void buffer_free(buffer* of) {
  free(of->data);
  memset(of, 0, sizeof *of);
}
