/* Products of matrices by the package scipy-openblas32, whose functions have the prefix scipy_.
   The Makefile builds it; mlxrunner/system/openblas.py preloads it. */
#define PRODUCT(T, name) \
  void scipy_##name(int, int, int, int, int, int, T, const T*, int, const T*, int, T, T*, int); \
  void name(int order, int ta, int tb, int m, int n, int k, T alpha, const T* a, int lda, \
            const T* b, int ldb, T beta, T* c, int ldc) { \
    scipy_##name(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \
  }
PRODUCT(float, cblas_sgemm)
PRODUCT(double, cblas_dgemm)
