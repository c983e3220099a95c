// Products of a few rows with a weight matrix, each output one chain of multiply-adds over the row.

#pragma once

#include "vectors.h"

#define PANEL 32   // outputs that lie together in a packed matrix
#define PARTS 4    // vectors in a panel
#define CHAIN 512  // longest chain of additions: bounds the rounding error of wide rows

// A matrix [num_out, width] as panels [num_out / PANEL, width, PANEL]; the last panel is filled up with zeros.
typedef struct {
    const float *panels, *bias;  // bias [num_out] or null
    int32_t num_out, width;
} Matrix;

// out[row] = matrix @ x[row] (+ bias) (+ what out held), for a tile of rows and of neighbouring panels.
INLINE void linear_tile(const int num_rows, const int num_panels, const Matrix *matrix, int first_out, const float *x, float *out,
                        int accumulate) {
    const int64_t width = matrix->width, num_out = matrix->num_out;
    const float *panels = matrix->panels + first_out * width;
    for (int64_t start = 0; start < width; start += CHAIN) {
        const int64_t stop = start + CHAIN < width ? start + CHAIN : width;
        vec sums[3 * PARTS];
        for (int i = 0; i < num_rows * num_panels * PARTS; i++) sums[i] = splat(0.0f);
        for (int64_t k = start; k < stop; k++) {
            vec operands[3];
            for (int row = 0; row < num_rows; row++) operands[row] = splat(x[row * width + k]);
            for (int part = 0; part < num_panels * PARTS; part++) {
                const vec weights = load(panels + (part / PARTS * width + k) * PANEL + part % PARTS * LANES);
                for (int row = 0; row < num_rows; row++) {
                    vec *sum = sums + row * num_panels * PARTS + part;
                    *sum = fma_each(operands[row], weights, *sum);
                }
            }
        }
        for (int row = 0; row < num_rows; row++)
            for (int part = 0; part < num_panels * PARTS && first_out + part * LANES < num_out; part++) {
                float *target = out + row * num_out + first_out + part * LANES;
                vec sum = sums[row * num_panels * PARTS + part];
                if (start == 0 && matrix->bias) sum += load(matrix->bias + first_out + part * LANES);
                if (start > 0 || accumulate) sum += load(target);
                store(target, sum);
            }
    }
}

// out[row] = matrix @ x[row] (+ bias) (+ what out held), [num_rows, width] to [num_rows, num_out].
APART void linear(const Matrix *matrix, const float *x, int num_rows, float *out, int accumulate) {
    const int64_t width = matrix->width, num_out = matrix->num_out;
    int first_out = 0;
    if (num_rows == 1)  // two panels, for one is too few sums to keep the processor busy
        for (; first_out + PANEL < num_out; first_out += 2 * PANEL) linear_tile(1, 2, matrix, first_out, x, out, accumulate);
    for (; first_out < num_out; first_out += PANEL)
        for (int row = 0; row < num_rows;) {
            const int left = num_rows - row, num = left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
            const float *source = x + row * width;
            float *target = out + row * num_out;
            switch (num) {
                case 1: linear_tile(1, 1, matrix, first_out, source, target, accumulate); break;
                case 2: linear_tile(2, 1, matrix, first_out, source, target, accumulate); break;
                default: linear_tile(3, 1, matrix, first_out, source, target, accumulate); break;
            }
            row += num;
        }
}
