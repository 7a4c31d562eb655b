// Tensor copies, compiled once for all kernels.
#include "ptx.cuh"

namespace emulator {

void load_box(const TensorMap& map, int x, int y, int z, uint32_t to, uint32_t barrier,
              uint16_t ctas) {
  const TensorMap box = map;
  const uint32_t bytes = static_cast<uint32_t>(box.box_atoms * box.box_rows) * 128;
  const auto land = [=](uint8_t* to) {
    const auto* const elements = reinterpret_cast<const uint16_t*>(box.address);
    for (uint64_t atom = 0; atom < box.box_atoms; atom++) {
      for (uint64_t row = 0; row < box.box_rows; row++) {
        for (uint64_t i = 0; i < ptx::kBoxDepth; i++) {
          const uint64_t col = (z + atom) * ptx::kBoxDepth + x + i, of = y + row;
          const uint16_t value =
              of < box.rows && col < box.cols ? elements[of * box.cols + col] : 0;
          const uint64_t chunk = i / 8 ^ row % 8;
          std::memcpy(to + (atom * box.box_rows + row) * 128 + chunk * 16 + i % 8 * 2, &value, 2);
        }
      }
    }
  };
  for (uint32_t rank = 0; rank < 16; rank++) {
    if (ctas >> rank & 1) copy(of_cluster(rank), to, barrier, bytes, land);
  }
}

void store_box(const TensorMap& map, int x, int y, uint32_t source) {
  const TensorMap box = map;
  const uint64_t row_bytes = 2 * box.box_atoms;
  if (source % 1024) fail("a swizzled box is not aligned to 1 KiB");
  if (x < 0 || y < 0) fail("a box begins before the matrix");
  if (2 * x % 16) fail("a box does not begin at a multiple of 16 bytes");
  global_store();
  const uint8_t* const from = at(source, box.box_rows * row_bytes);
  touch_async(*cta, source, box.box_rows * row_bytes);
  later(cta->running->stores, [=] {
    auto* const elements = reinterpret_cast<uint16_t*>(box.address);
    for (uint64_t row = 0; row < box.box_rows && y + row < box.rows; row++) {
      for (uint64_t i = 0; i < box.box_atoms && x + i < box.cols; i++) {
        const uint64_t chunk = row * row_bytes / 16 + i / 8;
        const uint64_t swizzled = chunk ^ chunk / 8 % (row_bytes / 16);
        std::memcpy(elements + (y + row) * box.cols + x + i, from + swizzled * 16 + i % 8 * 2, 2);
      }
    }
  });
}

}  // namespace emulator
