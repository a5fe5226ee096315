"""Files for mutual TLS of a made-up cluster, for the benchmarks and the tests."""

from pathlib import Path

import trustme

from services.worker.distattention.transport.tls import TlsFiles


def issue(ca: trustme.CA, folder: Path) -> TlsFiles:
    """One instance's certificate, its key, and the authority that vouches for it."""
    files = TlsFiles(folder / "certificate.pem", folder / "key.pem", folder / "ca.pem")
    certificate = ca.issue_cert("worker")
    certificate.cert_chain_pems[0].write_to_path(files.certificate)
    certificate.private_key_pem.write_to_path(files.key)
    ca.cert_pem.write_to_path(files.ca)
    return files
